"""Who may look at the dashboard, by what, and what other people's pages cannot do to it. Over real HTTP."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from semel import dashboard
from semel._concurrency.sync import run_sync
from semel.dashboard.templating import POLICY
from semel.service import Settings, asgi
from semel.service.auth import middleware, tokens
from support.pages import Browser, Node, Page, browser
from support.service import (
    TestServer,
    TokenServer,
    host_asgi,
    issue_token,
    local_server,
    make_app,
    shared_server,
    token_server,
)

ELSEWHERE = "http://evil.example"
PACKAGE = Path(dashboard.__file__).parent


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenServer]:
    with shared_server(request, tmp_path_factory) as server:
        yield server


@pytest.fixture(autouse=True)
def _no_failed_logins(request: pytest.FixtureRequest) -> None:
    if "server" in request.fixturenames:
        request.getfixturevalue("server").forget_failed_logins()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestServer]:
    """A service without tokens; which database it is on plays no part in who is let in."""
    folder = tmp_path_factory.mktemp("local")
    with local_server(f"sqlite:///{folder / 'semel.db'}", folder) as server:
        yield server


@pytest.fixture
def stranger(server: TokenServer) -> Iterator[Browser]:
    with browser(server) as stranger:
        yield stranger


@pytest.fixture
def root(server: TokenServer) -> Iterator[Browser]:
    with browser(server, server.root) as root:
        yield root


def cookies_of(answer: httpx.Response) -> dict[str, str]:
    """The cookies that an answer sets, each with its flags."""
    return {line.partition("=")[0]: line for line in answer.headers.get_list("set-cookie")}


def first_answer(page: Page) -> httpx.Response:
    """What came before the redirects."""
    return page.answer.history[0] if page.answer.history else page.answer


def example(path: str) -> str:
    """A path of a route with something in the place of its parameters."""
    return re.sub(r"\{[^}]*\}", "01980a5e-8d1c-7c3e-9f00-5f2d6a1b3c4d", path)


def routes(method: str) -> list[str]:
    """Every path of the dashboard that takes the method."""
    found = {path for handler in dashboard.HANDLERS if method in handler.http_methods for path in handler.paths}
    return sorted(found)


def test_without_a_session_a_page_leads_to_the_sign_in_and_from_there_back(
    server: TokenServer, stranger: Browser
) -> None:
    answer = stranger.client.get("/?window=day", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/sign-in?next=%2F%3Fwindow%3Dday")
    form = stranger.open("/?window=day")
    assert (form.status, form.path) == (200, "/ui/sign-in")
    assert form.one("input", name="next")["value"] == "/?window=day"
    page = stranger.sign_in(server.root.secret, form.one("input", name="next")["value"])
    assert (page.status, str(page.answer.url)) == (200, f"{server.address}/?window=day")
    assert "root" in page.one("div", class_="account").text


def test_the_cookies_are_for_this_site_alone_and_not_for_scripts(server: TokenServer, stranger: Browser) -> None:
    answer = first_answer(stranger.sign_in(server.root.secret))
    cookies = cookies_of(answer)
    assert set(cookies) == {"semel_session", "semel_csrf"}
    for line in cookies.values():
        assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(line.split("; ")[1:]), line
        assert "Secure" not in line
        assert "Max-Age" not in line


@pytest.mark.parametrize("header", [{"X-Forwarded-Proto": "https"}, {"X-Forwarded-Proto": "https, http"}])
def test_behind_tls_the_cookies_are_never_sent_without_it(
    server: TokenServer, stranger: Browser, header: dict[str, str]
) -> None:
    page = stranger.send("/ui/sign-in", {"token": server.root.secret}, headers=header, follow_redirects=False)
    assert all("Secure" in line for line in cookies_of(page.answer).values())
    assert len(cookies_of(page.answer)) == 2


def test_a_public_address_with_tls_makes_the_cookies_secure_too(tmp_path: Path) -> None:
    settings = Settings(public_url="https://semel.example/")
    with token_server(f"sqlite:///{tmp_path / 'semel.db'}", tmp_path, settings) as server:
        answer = server.http.get("/ui/sign-in")
        assert "Secure" in cookies_of(answer)["semel_csrf"]
        fields = {"token": server.root.secret, "csrf": server.http.cookies["semel_csrf"]}
        headers = {"Origin": "https://semel.example", "Cookie": f"semel_csrf={fields['csrf']}"}
        assert server.http.post("/ui/sign-in", data=fields, headers=headers).status_code == 303


def test_a_token_that_is_not_good_opens_nothing_and_says_so(server: TokenServer, stranger: Browser) -> None:
    for wrong in ("", "nonsense", f"{server.root.secret}x", "semel_" + "0" * 16 + "_" + "x" * 43, "semel_é\x00"):
        page = stranger.sign_in(wrong)
        assert page.status == 401
        assert "invalid" in page.one(role="alert").text
        assert "semel_session" not in cookies_of(page.answer)
    assert stranger.open("/").path == "/ui/sign-in"


def test_failed_sign_ins_count_against_the_same_limit_as_wrong_tokens(server: TokenServer, stranger: Browser) -> None:
    csrf = stranger.csrf
    server.forget_failed_logins(refilled=0.01)  # slower than this machine, however busy it is
    for _ in range(middleware.FAILURES // 2):
        assert stranger.client.post("/ui/sign-in", data={"csrf": csrf, "token": "wrong"}).status_code == 401
    nobody = server.sending("semel_wrong")
    assert 429 in [nobody.get("/runs").status_code for _ in range(middleware.FAILURES)]
    page = stranger.sign_in("wrong")
    assert page.status == 429
    assert int(page.answer.headers["retry-after"]) >= 1
    assert "too many" in page.one(role="alert").text


def test_the_api_knows_no_cookies(server: TokenServer, root: Browser) -> None:
    schema = server.root.get("/schema/openapi.json").json()
    asked = 0
    for path, methods in schema["paths"].items():
        if path in ("/healthz", "/readyz") or path.startswith("/api/cloud/webhooks/"):
            continue
        for method in methods:
            answer = root.client.request(method, example(path), json={}, follow_redirects=False)
            assert answer.status_code == 401, (method, path, answer.text)
            assert answer.headers["content-type"] == "application/problem+json"
            asked += 1
    assert asked > 40


@pytest.mark.parametrize(
    "path",
    [
        "/ui/../runs",
        "/ui/..%2fruns",
        "/ui/%2e%2e/runs",
        "//runs",
        "/ui//runs/..//../runs",
        "/ui/./../models",
        "/UI/../runs",
    ],
)
def test_no_spelling_of_a_path_takes_the_cookie_to_the_api(server: TokenServer, root: Browser, path: str) -> None:
    server.root.post("/runs", json={"model": "add", "parameters": {"a": 1}})
    host, _, port = server.address.removeprefix("http://").partition(":")
    request = httpx.Request("GET", httpx.URL(scheme="http", host=host, port=int(port), raw_path=path.encode()))
    request.headers["cookie"] = f"semel_session={server.root.secret}"
    answer = root.client.send(request, follow_redirects=False)
    assert answer.status_code == 401 or "json" not in answer.headers.get("content-type", ""), answer.text


def test_a_mount_that_hides_a_path_in_another_takes_no_cookie_to_the_api(tmp_path: Path) -> None:
    """A server may name a root that is not in the path; Litestar takes it off wherever it finds it."""
    app = make_app(f"sqlite:///{tmp_path / 'semel.db'}", tmp_path)
    secret = issue_token(app, "root", "admin")

    async def asked() -> tuple[httpx.Response, httpx.Response]:
        service = asgi(app)
        transport = httpx.ASGITransport(app=service, root_path="/semel", client=("127.0.0.1", 1))
        async with service.lifespan(), httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            by_token = await client.get("/ui/semel/runs", headers={"Authorization": f"Bearer {secret}"})
            by_cookie = await client.get("/ui/semel/runs", headers={"Cookie": f"semel_session={secret}"})
            return by_token, by_cookie

    by_token, by_cookie = asyncio.run(asked())
    app.close()
    assert by_token.json() == {"runs": [], "next": None}, "the path does lead to the API"
    assert by_cookie.status_code == 401


@pytest.mark.parametrize(
    "onward",
    [
        "//evil.example",
        "https://evil.example/",
        "/\\evil.example",
        "\\/evil.example",
        "/\t/evil.example",
        "\n//evil.example",
        " //evil.example",
        "javascript:alert(1)",
        "evil.example",
        "/ü",
        "/\U0001f600",
        "/x\r\nSet-Cookie: a=b",
        "/" + "x" * 3000,
    ],
)
def test_the_sign_in_goes_on_only_to_pages_of_its_own(server: TokenServer, stranger: Browser, onward: str) -> None:
    form = stranger.client.get("/ui/sign-in", params={"next": onward})
    if form.status_code == 200:
        assert Page(form).one("input", name="next")["value"] == "/"
    else:
        assert form.status_code == 400
    fields = {"token": server.root.secret, "next": onward, "csrf": stranger.csrf}
    answer = stranger.client.post("/ui/sign-in", data=fields, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert set(cookies_of(answer)) == {"semel_session", "semel_csrf"}


def test_signing_out_forgets_the_token_in_this_browser_alone(server: TokenServer, root: Browser) -> None:
    page = root.send("/ui/sign-out")
    assert page.path == "/ui/sign-in"
    assert "semel_session" not in root.client.cookies
    assert root.open("/").path == "/ui/sign-in"
    assert server.root.get("/runs").status_code == 200


def test_a_form_without_the_secret_of_its_browser_changes_nothing(server: TokenServer, root: Browser) -> None:
    secret = root.csrf
    other = "x" * 43
    for fields in (
        {},
        {"csrf": ""},
        {"csrf": other},
        {"csrf": secret[:-1]},
        {"csrf": [other, secret]},
        {"CSRF": secret},
    ):
        answer = root.client.post("/ui/sign-out", data={**fields, "more": "1"}, follow_redirects=False)
        assert answer.status_code == 403, fields
        assert Page(answer).one("code").text == "CSRF"
    assert root.open("/").path == "/"


def test_a_form_is_refused_where_the_browser_has_no_secret_or_one_that_is_not_ours(server: TokenServer) -> None:
    for cookie in ("", "semel_csrf=", "semel_csrf=short", f"semel_csrf={'é' * 43}", f"xsemel_csrf={'x' * 43}"):
        headers = {"Cookie": f"{cookie}; semel_session={server.root.secret}".encode()}
        for value in ("", "short", "x" * 43):
            answer = server.http.post("/ui/sign-out", data={"csrf": value}, headers=headers)
            assert answer.status_code == 403, (cookie, value)


@pytest.mark.parametrize(
    "origin", [ELSEWHERE, "null", "http://127.0.0.1:1", "http://127.0.0.1", "", "//", "http://[", "x"]
)
def test_a_form_that_another_page_sends_changes_nothing(server: TokenServer, root: Browser, origin: str) -> None:
    page = root.send("/ui/sign-out", headers={"Origin": origin}, follow_redirects=False)
    assert (page.status, page.one("code").text) == (403, "CROSS_ORIGIN")
    assert root.open("/").path == "/"


def test_a_form_that_comes_through_a_proxy_is_known_by_the_name_that_the_browser_sees(root: Browser) -> None:
    headers = {"Origin": "https://semel.example", "X-Forwarded-Host": "semel.example, inner.example"}
    assert root.send("/ui/sign-out", headers=headers, follow_redirects=False).status == 303


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=x", "application/json", ""])
def test_a_form_comes_as_browsers_send_forms(root: Browser, kind: str) -> None:
    content = f"csrf={root.csrf}".encode()
    answer = root.client.post("/ui/sign-out", content=content, headers={"Content-Type": kind}, follow_redirects=False)
    assert answer.status_code == 415
    assert root.open("/").path == "/"


def test_a_form_that_cannot_be_read_is_refused(root: Browser) -> None:
    head = {"Content-Type": "application/x-www-form-urlencoded"}
    many = "&".join(f"f{number}=1" for number in range(6000))
    for content in (b"csrf=\xff\xfe", f"csrf={root.csrf}&{many}".encode()):
        answer = root.client.post("/ui/sign-out", content=content, headers=head, follow_redirects=False)
        assert answer.status_code == 400


def test_every_form_of_the_dashboard_is_refused_without_its_secret(root: Browser) -> None:
    found = routes("POST")
    assert {"/ui/sign-in", "/ui/sign-out"} <= set(found)
    for path in found:
        answer = root.client.post(example(path), data={"x": "1"}, follow_redirects=False)
        assert answer.status_code == 403, (path, answer.text)
        assert Page(answer).one("code").text == "CSRF", path
    methods = {method for handler in dashboard.HANDLERS for method in handler.http_methods}
    assert methods == {"GET", "POST"}, "what changes something is a POST"


def test_every_form_on_every_page_carries_the_secret(root: Browser) -> None:
    seen = 0
    for path in [path for path in routes("GET") if "{" not in path and "/live" not in path]:
        page = root.open(path)
        for form in page.all("form"):
            if form.get("method") == "post":
                assert form.one("input", name="csrf")["value"] == root.csrf, path
                seen += 1
    assert seen


def test_every_answer_of_the_dashboard_has_the_policy_and_no_page_breaks_it(server: TokenServer, root: Browser) -> None:
    answers = [server.nobody.get("/"), server.nobody.get("/ui/sign-in"), server.nobody.post("/ui/sign-out")]
    answers += [root.client.post("/ui/sign-out", data={"x": "1"}), root.client.get("/ui/nowhere")]
    answers += [root.client.get("/ui/static/semel.css"), root.client.get("/ui/static/nothing.css")]
    for path in routes("GET"):
        if "/live" not in path:
            answers.append(root.client.get(example(path), follow_redirects=False))
    with root.client.stream("GET", "/ui/live") as live:
        answers.append(live)
    assert len(answers) > 10
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert policy == POLICY or "sandbox" in policy, answer.url
        assert answer.headers["x-content-type-options"] == "nosniff"
        if answer.headers.get("content-type", "").startswith("text/html"):
            assert_fits_policy(Page(answer))


def assert_fits_policy(page: Page) -> None:
    """Nothing on the page is what the policy would stop."""
    assert not page.all("style")
    for each in page.root.walk():
        assert not [name for name in each.attributes if name == "style" or name.startswith("on")], page.path
        for name in ("src", "href", "action", "formaction"):
            assert_local(each, name)
    for script in page.all("script"):
        assert script["src"].startswith("/ui/static/"), page.path
        assert not script.text


def assert_local(node: Node, name: str) -> None:
    address = node.get(name)
    if address is not None:
        assert re.match(r"/(?!/)|#|\?|$", address), f"{node.tag} {name}={address}"


def test_no_template_says_that_something_is_safe() -> None:
    texts = {path: path.read_text() for kind in ("*.html", "*.py") for path in PACKAGE.rglob(kind)}
    assert len(texts) > 15
    for path, text in texts.items():
        assert not re.search(r"\|\s*safe\b|autoescape\s*(=\s*False|false)|\bMarkup\b|\|\s*tojson\b", text), path.name


def test_a_token_that_is_revoked_ends_the_session(server: TokenServer) -> None:
    person = server.admit("brief")
    with browser(server, person) as brief:
        ledger = server.app.ledger(awaited=False)
        assert run_sync(ledger.write(tokens.revoke, person.id, None, ledger.statement_context))
        run_sync(ledger.close())
        server.state.auth.clear_cache()
        assert brief.open("/").path == "/ui/sign-in"
        assert brief.sign_in(server.root.secret).path == "/"


def test_a_page_can_be_asked_for_with_a_token_as_the_api_can(server: TokenServer) -> None:
    assert server.root.get("/").status_code == 200
    assert server.sending("semel_wrong").get("/").status_code == 303


def test_refusals_are_pages_for_people(server: TokenServer, root: Browser) -> None:
    page = root.open("/ui/nowhere")
    assert (page.status, page.one("h1").text) == (404, "Not Found")
    assert [each["href"] for each in page.one("nav").all("a")][:2] == ["/", "/ui/runs"]
    large = root.client.post("/ui/sign-out", data={"csrf": root.csrf, "x": "x" * 1_100_000}, follow_redirects=False)
    assert large.status_code == 413
    assert "the body is larger than" in Page(large).text
    wrong = root.open("/?window=century")
    assert wrong.status == 400
    assert "window" in wrong.text
    assert root.client.put("/").status_code == 405


def test_what_a_form_did_is_told_once_and_only_by_us(root: Browser) -> None:
    root.client.cookies.set("semel_flash", "%3Cb%3Edone%3C%2Fb%3E", domain="127.0.0.1", path="/")
    page = root.open("/")
    assert page.one(role="status").text == "<b>done</b>"
    assert "Max-Age=0" in cookies_of(page.answer)["semel_flash"]


def test_the_theme_is_one_of_two_whatever_the_cookie_says(root: Browser) -> None:
    for value, shown in (("dark", "dark"), ("light", "light"), ('"><script>', None), ("x", None)):
        root.client.cookies.set("semel_theme", value, domain="127.0.0.1", path="/")
        assert root.open("/").one("html").get("data-theme") == shown


def test_static_files_need_no_token_and_are_kept_by_their_version(server: TokenServer) -> None:
    page = Page(server.nobody.get("/ui/sign-in"))
    addresses = [page.one("script")["src"], *(each["href"] for each in page.all("link"))]
    assert len(addresses) == 3
    for address in addresses:
        answer = server.nobody.get(address)
        assert (answer.status_code, answer.headers["cache-control"]) == (200, "public, max-age=31536000, immutable")
        again = server.nobody.get(address, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        old = server.nobody.get(address.partition("?")[0] + "?v=old")
        assert (old.status_code, old.headers["cache-control"]) == (200, "no-cache")
    for name in ("nothing.css", "..%2fpages.py", "%2e%2e/pages.py", "templates", "semel.css/x"):
        assert server.nobody.get(f"/ui/static/{name}").status_code in (303, 404), name


def test_a_page_weighs_little(root: Browser) -> None:
    page = root.open("/")
    files = [page.one("script")["src"], *(each["href"] for each in page.all("link"))]
    assert sum(len(root.client.get(each).content) for each in files) + len(page.answer.content) <= 200_000


def test_without_tokens_the_machine_itself_needs_no_sign_in(local: TestServer) -> None:
    with browser(local) as somebody:
        page = somebody.open("/")
        assert page.status == 200
        assert page.one("div", class_="account").text == "Theme local admin"
        assert not page.all("form", action="/ui/sign-out")
        assert somebody.open("/ui/sign-in").path == "/"
        somebody.client.cookies.set("semel_session", "semel_of_another_server", domain="127.0.0.1", path="/")
        assert somebody.open("/").path == "/"


@pytest.mark.parametrize("path", ["/", "/ui/sign-in", "/ui/live", "/ui/runs"])
def test_without_tokens_no_other_name_and_no_proxy_reaches_a_page(local: TestServer, path: str) -> None:
    with local.client() as client:
        for headers in ({"Host": "evil.example"}, {"X-Forwarded-For": "1.2.3.4"}, {"Origin": ELSEWHERE}):
            answer = client.get(path, headers=headers)
            assert answer.status_code == 403
            assert answer.headers["content-security-policy"] == POLICY
            assert "while there are no tokens" in Page(answer).text


def test_without_tokens_another_page_of_the_machine_cannot_send_forms(local: TestServer) -> None:
    with browser(local) as somebody:
        page = somebody.send("/ui/sign-out", headers={"Origin": "http://localhost:9999"}, follow_redirects=False)
        assert (page.status, page.one("code").text) == (403, "CROSS_ORIGIN")


def test_mounted_under_a_prefix_everything_stays_below_it(sqlite_url: str, tmp_path: Path) -> None:
    app = make_app(sqlite_url, tmp_path)
    secret = issue_token(app, "root", "admin")
    with host_asgi(Starlette(routes=[Mount("/semel", asgi(app))])) as client:
        away = client.get("/semel/?window=week")
        assert (away.status_code, away.headers["location"]) == (
            303,
            "/semel/ui/sign-in?next=%2Fsemel%2F%3Fwindow%3Dweek",
        )
        form = Page(client.get(away.headers["location"]))
        assert form.one("form")["action"] == "/semel/ui/sign-in"
        assert client.get(form.one("script")["src"]).status_code == 200
        fields = {each["name"]: each["value"] for each in form.all("input", type="hidden")}
        signed = client.post("/semel/ui/sign-in", data={**fields, "token": secret})
        assert (signed.status_code, signed.headers["location"]) == (303, "/semel/?window=week")
        assert "Path=/semel" in cookies_of(signed)["semel_session"].split("; ")
        page = Page(client.get("/semel/?window=week"))
        assert page.status == 200
        links = [each["href"] for each in page.all("a") if not each["href"].startswith("#")]
        assert links
        assert all(each.startswith("/semel/") for each in links)
        assert page.one(id="overview")["data-live"] == "/semel/ui/live?window=week"
        outside = client.post("/semel/ui/sign-in", data={**fields, "next": "/elsewhere", "token": secret})
        assert outside.status_code == 403, "the secret is another after the sign-in"
    app.close()


def test_of_two_sessions_in_one_browser_neither_counts(server: TokenServer) -> None:
    """A page on another port of the same host may have set one of them: nobody is to act as somebody else."""
    alice, bob = server.admit("alice"), server.admit("bob")
    for sent in (f"semel_session={bob.secret}; semel_session={alice.secret}", "semel_session=x; semel_session=y"):
        answer = server.http.get("/ui/runs", headers={"Cookie": sent})
        assert (answer.status_code, answer.headers["location"]) == (303, "/ui/sign-in?next=%2Fui%2Fruns")
    same = f"semel_session={alice.secret}; semel_session={alice.secret}"
    assert server.http.get("/ui/runs", headers={"Cookie": same}).status_code == 200


def test_who_guesses_the_address_finds_the_overview_and_pages_say_their_charset_once(
    server: TokenServer, root: Browser
) -> None:
    assert root.open("/ui").path == "/"
    assert root.open("/ui/").path == "/"
    for path in ("/", "/ui/runs", "/ui/runs/nothing"):
        assert root.client.get(path).headers["content-type"] == "text/html; charset=utf-8"
