"""The browser of the tests detects every kind of fault, on small pages that have one fault each."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from support import browser, serve_command
from support.browser import NoBrowser, Visitor, barriers, found_browser, sticks_out

POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'"
SOUND = '<!doctype html><html lang="en"><head><title>sound</title></head><body><main><h1>{}</h1></main></body></html>'


Visit = Callable[..., Visitor]


class Pages(BaseHTTPRequestHandler):
    """Serves the page that the server has for the path."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        status, kind, text, policy = self.server.pages.get(path, (404, "text/plain", "nothing here", ""))  # type: ignore[attr-defined]
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        if policy:
            self.send_header("Content-Security-Policy", policy)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class Shelf:
    """A server of small pages."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self._pages = server.pages = {"/favicon.ico": (200, "image/x-icon", "", "")}  # type: ignore[attr-defined]
        self.address = f"http://127.0.0.1:{server.server_port}"

    def put(self, path: str, text: str, *, kind: str = "text/html", policy: str = "", status: int = 200) -> None:
        self._pages[path] = (status, kind, text, policy)


@contextmanager
def serving_pages() -> Iterator[Shelf]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield Shelf(server)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    with serving_pages() as shelf:
        yield shelf


@pytest.fixture(autouse=True)
def pictures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of screenshots, a temporary one in these tests."""
    monkeypatch.setattr(browser, "ARTIFACTS", tmp_path / "pictures")
    return tmp_path / "pictures"


def only_fault(visitor: Visitor) -> str:
    """The only fault, which is then pardoned."""
    (fault,) = visitor.faults
    visitor.pardon("")
    return fault


def test_a_sound_page_has_no_fault(visit: Visit, shelf: Shelf) -> None:
    shelf.put("/", SOUND.format("well"), policy=POLICY)
    visitor = visit(shelf.address)
    assert visitor.go("/").inner_text("h1") == "well"
    assert visitor.faults == []
    assert barriers(visitor.page) == []
    assert visitor.faults == [], "the check of accessibility itself keeps to the policy"


def test_an_error_in_the_console_is_a_fault_and_a_warning_is_none(visit: Visit, shelf: Shelf) -> None:
    shelf.put("/", SOUND.format("<script>console.warn('mild'); console.error('grave', 5)</script>"))
    visitor = visit(shelf.address)
    visitor.go("/")
    assert only_fault(visitor) == "console: grave 5"


def test_an_exception_in_a_script_is_a_fault(visit: Visit, shelf: Shelf) -> None:
    shelf.put("/", SOUND.format("<script>undefined.gone</script>"))
    visitor = visit(shelf.address)
    visitor.go("/")
    assert "Cannot read properties of undefined" in only_fault(visitor)


def test_a_rejection_that_nobody_handles_is_a_fault(visit: Visit, shelf: Shelf) -> None:
    shelf.put("/", SOUND.format("<script>Promise.reject(new Error('lost'))</script>"))
    visitor = visit(shelf.address)
    visitor.go("/")
    assert "lost" in only_fault(visitor)


@pytest.mark.parametrize(
    "breach",
    [
        "<script>document.title = 'run'</script>",
        "<img alt='' src='data:image/png,broken' onerror='document.title = 1'>",
        "<p style='color: red'>red</p>",
        "<style>p { color: red }</style>",
        "<iframe title='inner' src='/other'></iframe>",
    ],
    ids=["script", "handler", "attribute", "style", "frame"],
)
def test_a_breach_of_the_policy_is_a_fault(visit: Visit, shelf: Shelf, breach: str) -> None:
    shelf.put("/", SOUND.format(breach), policy=POLICY)
    visitor = visit(shelf.address)
    visitor.go("/")
    noted = [fault for fault in visitor.faults if fault.startswith("console: CSP: ")]
    assert noted, visitor.faults
    assert visitor.page.title() == "sound"
    visitor.pardon("CSP|Content Security Policy")


def test_a_request_to_another_host_is_a_fault_and_reaches_nobody(visit: Visit, shelf: Shelf) -> None:
    shelf.put("/", SOUND.format("<img alt='' src='http://somewhere.example/spy.png'>"))
    visitor = visit(shelf.address)
    visitor.go("/")
    assert "foreign: http://somewhere.example/spy.png" in visitor.faults
    assert any("ERR_NAME_NOT_RESOLVED" in fault for fault in visitor.faults)
    visitor.pardon("somewhere")


def test_a_request_to_another_port_of_this_machine_is_a_fault(visit: Visit, shelf: Shelf) -> None:
    with serving_pages() as other:
        other.put("/style.css", "p { color: black }", kind="text/css")
        shelf.put("/", SOUND.format(f"<link rel='stylesheet' href='{other.address}/style.css'>"))
        visitor = visit(shelf.address)
        visitor.go("/")
        assert only_fault(visitor) == f"foreign: {other.address}/style.css"


def test_a_picture_in_the_page_itself_is_no_request_to_elsewhere(visit: Visit, shelf: Shelf) -> None:
    dot = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"
    shelf.put("/", SOUND.format(f"<img alt='' src='{dot}'>"), policy=POLICY)
    visitor = visit(shelf.address)
    visitor.go("/")
    assert visitor.faults == []


@pytest.mark.parametrize("status", [404, 500])
def test_an_answer_that_refuses_is_a_fault(visit: Visit, shelf: Shelf, status: int) -> None:
    shelf.put("/", SOUND.format("<script type='module'>await fetch('/part')</script>"))
    shelf.put("/part", "no", kind="text/plain", status=status)
    visitor = visit(shelf.address)
    with visitor.page.expect_response("**/part"):
        visitor.go("/")
    assert only_fault(visitor) == f"answered {status}: GET {shelf.address}/part"


def test_a_dialog_is_a_fault_and_does_not_stop_the_test(visit: Visit, shelf: Shelf) -> None:
    shelf.put("/", SOUND.format("<script>alert('injected')</script>"))
    visitor = visit(shelf.address)
    visitor.go("/")
    assert only_fault(visitor) == "dialog: injected"


def test_a_fault_in_a_second_window_counts(visit: Visit, shelf: Shelf) -> None:
    shelf.put("/", SOUND.format("<a target='_blank' href='/second'>on</a>"))
    shelf.put("/second", SOUND.format("<script>console.error('there')</script>"))
    visitor = visit(shelf.address)
    visitor.go("/")
    with visitor.context.expect_page() as opened:
        visitor.page.click("a")
    opened.value.wait_for_load_state()
    assert only_fault(visitor) == "console: there"


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ("<img src='/favicon.ico'>", "image-alt"),
        ("<form><input name='q'></form>", "label"),
        ("<p id='pale'>hardly to be seen</p>", "color-contrast"),
    ],
    ids=["picture", "field", "colour"],
)
def test_a_barrier_of_the_page_is_found(visit: Visit, shelf: Shelf, body: str, rule: str) -> None:
    shelf.put("/pale.css", "#pale { color: #ddd; background: white; font-size: 12px }", kind="text/css")
    shelf.put("/", SOUND.format("faulty").replace("</main>", f"<link rel='stylesheet' href='/pale.css'>{body}</main>"))
    visitor = visit(shelf.address)
    visitor.go("/")
    assert [fault.split()[1] for fault in barriers(visitor.page)] == [rule]
    with pytest.raises(AssertionError, match=f"light: axe: {rule}"):
        visitor.look("barrier")


def test_a_barrier_of_one_look_only_is_found(visit: Visit, shelf: Shelf) -> None:
    shelf.put(
        "/looks.css",
        "body { color: #111; background: #fff } #folds { display: none }"
        "@media (prefers-color-scheme: dark) { body { background: #222 } }"
        "@media (max-width: 400px) { #folds { display: block } }",
        kind="text/css",
    )
    body = "<link rel='stylesheet' href='/looks.css'>looks</h1><p>words</p><input id='folds'><p>"
    shelf.put("/", SOUND.format(body))
    visitor = visit(shelf.address)
    visitor.go("/")
    with pytest.raises(AssertionError) as raised:
        visitor.look("looks")
    said = [line.split(" ")[:3] for line in str(raised.value).splitlines()[1:]]
    assert said == [["dark:", "axe:", "color-contrast"], ["phone:", "axe:", "label"]]


def test_pictures_are_kept_light_dark_and_on_a_phone(
    visit: Visit, shelf: Shelf, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEMEL_TEST_PICTURES", "1")
    shelf.put("/", SOUND.format("a picture"))
    visitor = visit(shelf.address)
    visitor.go("/")
    visitor.look("sound")
    kept = [pictures / f"sound-{look}.png" for look in ("light", "dark", "phone")]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in kept)


def test_what_sticks_out_of_a_phone_is_named(visit: Visit, shelf: Shelf) -> None:
    shelf.put("/wide.css", "#wide { width: 700px; height: 20px }", kind="text/css")
    body = "<link rel='stylesheet' href='/wide.css'></h1><div id='wide'></div><h1>"
    shelf.put("/", SOUND.format(body))
    visitor = visit(shelf.address)
    assert sticks_out(visitor.go("/")) == []
    with pytest.raises(AssertionError, match=r'phone: wider than the window: .*<div id="wide">'):
        visitor.look("wide")


def test_a_page_weighs_what_its_parts_weigh_on_every_first_visit(visit: Visit, shelf: Shelf) -> None:
    shelf.put("/part.css", "/*" + "x" * 50_000 + "*/", kind="text/css")
    shelf.put("/", SOUND.format("<link rel='stylesheet' href='/part.css'>"))
    visitor = visit(shelf.address)
    weights = [visitor.weigh("/"), visitor.weigh("/")]
    assert all(50_000 < weight < 52_000 for weight in weights), weights


def test_a_fault_that_nobody_looked_for_fails_the_test(
    chromium: Browser, request: pytest.FixtureRequest, shelf: Shelf, pictures: Path
) -> None:
    shelf.put("/", SOUND.format("<script>console.error('unseen')</script>"))
    with pytest.raises(AssertionError, match="console: unseen"), browser.visiting(chromium, request) as visit:
        visit(shelf.address).go("/")
    assert (pictures / f"failed-{request.node.name}-0.png").exists()


def test_no_browser_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SEMEL_TEST_BROWSER", str(tmp_path / "none"))
    with pytest.raises(NoBrowser, match=r"SEMEL_TEST_BROWSER is .*none, which cannot be run.*apt install chromium"):
        found_browser()
    monkeypatch.delenv("SEMEL_TEST_BROWSER")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoBrowser, match="dashboard is NOT tested: none of chromium-headless-shell, chromium"):
        found_browser()


def test_without_a_browser_the_tests_of_pages_fail_and_are_not_skipped(tmp_path: Path) -> None:
    sample = tmp_path / "test_sample.py"
    sample.write_text("def test_a_page(visit):\n    visit('http://127.0.0.1:1')\n")
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "conftest",
            "--rootdir",
            tmp_path,
            sample,
        ],
        env=serve_command.environment(
            SEMEL_TEST_BROWSER=str(tmp_path / "none"),
            PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",  # the packages installed here have many plugins
        ),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=browser.PATIENCE * 2,
        check=False,
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "1 error" in ran.stdout
    assert "the dashboard is NOT tested" in ran.stdout
