"""A real Chromium that opens our pages, and records everything that goes wrong in them.

The browser is the system's: SEMEL_TEST_BROWSER, or the first of ``NAMES`` on the PATH. Without one the tests fail with
a message; they are never skipped.
"""

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Dialog,
    Error,
    Page,
    Playwright,
    Request,
    Response,
    WebSocket,
    expect,
    sync_playwright,
)

PATIENCE = 60.0
ARTIFACTS = Path(__file__).parents[2] / "test-artifacts"
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
LONGEST_PICTURE = 2400
FIRST_ROWS = 6
LOOK_AT = "async ([part, options]) => (await axe.run(part, options)).violations"
DESK = {"width": 1280, "height": 800}
PHONE = {"width": 360, "height": 740}
LOOKS: dict[str, tuple[Any, Any]] = {"light": (DESK, "light"), "dark": (DESK, "dark"), "phone": (PHONE, "light")}
# Each look is checked only for what can differ in it: dark has other colours, a phone has another layout.
ASKED: dict[str, dict[str, Any]] = {
    "light": {},
    "dark": {"runOnly": ["color-contrast"]},
    "phone": {"rules": {"color-contrast": {"enabled": False}}},
}
FLAGS = [
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",  # nothing leaves this machine
]
# The console has most violations, but not those of a report-only policy.
LISTEN = """addEventListener('securitypolicyviolation', violation => console.error(
    `CSP: ${violation.effectiveDirective} forbids ${violation.blockedURI || 'this'} in ${violation.documentURI}`));"""
# The elements that extend beyond the right edge of the window; none if the page does not scroll sideways.
STICKS_OUT = """() => document.scrollingElement.scrollWidth <= innerWidth ? [] :
    [...document.querySelectorAll('body *')].filter(part => part.getBoundingClientRect().right > innerWidth + 0.5)
    .slice(0, 8).map(part => part.outerHTML.slice(0, 90))"""
# Chromium also writes each of these to the console, after the failed request has been recorded.
TOLD_TWICE = "Failed to load resource:"

expect.set_options(timeout=PATIENCE * 1000)


class NoBrowser(Exception):
    """No Chromium was found."""


def found_browser() -> str:
    """The path of the system's Chromium."""
    given = os.environ.get("SEMEL_TEST_BROWSER")
    for name in (given,) if given else NAMES:
        if path := shutil.which(name):
            return path
    looked = f"SEMEL_TEST_BROWSER is {given}, which cannot be run" if given else f"none of {', '.join(NAMES)} is there"
    raise NoBrowser(
        f"no browser was found, so the dashboard is NOT tested: {looked}. "
        "Install one (Debian: apt install chromium) or set SEMEL_TEST_BROWSER to the path of a Chromium."
    )


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser until the end of the block.

    Playwright keeps its event loop running in the thread until then, so that other tests could not run theirs: the
    block covers the tests of one file.
    """
    path = found_browser()
    with sync_playwright() as driver:
        browser = _launched(driver, path)
        try:
            yield browser
        finally:
            browser.close()


def _launched(driver: Playwright, path: str) -> Browser:
    """Chromium in its sandbox, except for root, and where the system does not allow a sandbox."""
    if os.getuid() != 0:
        try:
            return driver.chromium.launch(executable_path=path, args=FLAGS, chromium_sandbox=True)
        except Error as problem:
            if "sandbox" not in str(problem).lower():
                raise
    return driver.chromium.launch(executable_path=path, args=FLAGS, chromium_sandbox=False)


class Visitor:
    """A user with their own browser context (no cookies, an empty cache) who visits the pages of one address.

    Everything that goes wrong is a fault: an error in the console or in a script, a request that fails or is refused, a
    request to any other address, a violation of the Content-Security-Policy, a dialog, a crash.
    """

    def __init__(self, browser: Browser, address: str, **options: Any) -> None:
        self.address = address.rstrip("/")
        self._noted: list[str] = []
        self._pardoned: list[re.Pattern[str]] = []
        self._agreed: list[str] = []
        self.context = browser.new_context(
            base_url=self.address, viewport=DESK, locale="en", timezone_id="UTC", service_workers="block", **options
        )
        self.context.set_default_timeout(PATIENCE * 1000)
        self.context.add_init_script(LISTEN)
        self.context.on("console", self._hear)
        self.context.on("weberror", lambda happened: self._noted.append(f"script: {happened.error}"))
        self.context.on("request", lambda request: self._trace(request.url))
        self.context.on("requestfailed", self._miss)
        self.context.on("response", self._answered)
        self.context.on("dialog", self._asked)
        self.context.on("page", self._attend)
        self.page = self.context.new_page()

    def _attend(self, page: Page) -> None:
        page.on("crash", lambda _: self._noted.append("the page crashed"))
        page.on("websocket", self._plug)

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "assert") and not message.text.startswith(TOLD_TWICE):
            self._noted.append(f"console: {message.text}")

    def _trace(self, url: str) -> None:
        asked, own = urlsplit(url), urlsplit(self.address)
        if asked.scheme not in ("data", "blob", "about") and asked.netloc != own.netloc:
            self._noted.append(f"foreign: {url}")

    def _plug(self, line: WebSocket) -> None:
        self._trace(line.url)

    def _miss(self, request: Request) -> None:
        why = request.failure or "unknown"
        if "ERR_ABORTED" not in why:  # the browser left the page, or the page aborted the request itself
            self._noted.append(f"failed: {request.method} {request.url}: {why}")

    def _answered(self, response: Response) -> None:
        if response.status >= 400:
            self._noted.append(f"answered {response.status}: {response.request.method} {response.url}")

    def _asked(self, dialog: Dialog) -> None:
        if dialog.message in self._agreed:
            self._agreed.remove(dialog.message)
            dialog.accept()
            return
        self._noted.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def pardon(self, pattern: str) -> None:
        """Ignore faults that match the pattern: the test expects them."""
        self._pardoned.append(re.compile(pattern))

    def agree(self, question: str) -> None:
        """Accept the next dialog with this question."""
        self._agreed.append(question)

    @property
    def faults(self) -> list[str]:
        """The faults until now, without the pardoned ones."""
        for page in self.context.pages:
            _catch_up(page)
        noted = self._noted + [f"never asked: {question}" for question in self._agreed]
        return [fault for fault in noted if not any(pattern.search(fault) for pattern in self._pardoned)]

    def go(self, path: str) -> Page:
        """Open a page of the address, and wait until it has loaded."""
        self.page.goto(path)
        return self.page

    def look(self, name: str, accessible: Collection[str] = LOOKS.keys()) -> None:
        """Look at the page in light, in dark and on a phone. Fails if it scrolls sideways in one of them, or is not
        accessible in one of those looks.

        With SEMEL_TEST_PICTURES a screenshot of each is kept.
        """
        found: list[str] = []
        for look, (size, scheme) in LOOKS.items():
            self.page.set_viewport_size(size)
            self.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            if os.environ.get("SEMEL_TEST_PICTURES"):
                self._keep_picture(f"{name}-{look}", whole=look != "dark")  # dark differs in its colours only
            faults = barriers(self.page, **ASKED[look]) if look in accessible else []
            found += [f"{look}: {fault}" for fault in faults + sticks_out(self.page)]
        self.page.set_viewport_size(LOOKS["light"][0])
        self.page.emulate_media(color_scheme="light", reduced_motion="reduce")
        assert not found, "\n".join([f"{name} at {self.page.url}:", *found])

    def _keep_picture(self, name: str, *, whole: bool) -> None:
        """Keep a screenshot of the page, or of its first screen."""
        ARTIFACTS.mkdir(exist_ok=True)
        part: Any = {"full_page": True, "clip": self._extent()} if whole else {}
        self.page.screenshot(path=ARTIFACTS / f"{name}.png", animations="disabled", **part)

    def _extent(self) -> Any:
        """The part of the page in the screenshot: from its top, up to ``LONGEST_PICTURE`` pixels."""
        width, height = self.page.evaluate("[innerWidth, Math.max(innerHeight, document.documentElement.scrollHeight)]")
        return {"x": 0, "y": 0, "width": width, "height": min(height, LONGEST_PICTURE)}

    def weigh(self, path: str) -> int:
        """How many bytes a first visit to the page transfers, with everything that it needs."""
        bytes_of: dict[str, float] = {}

        def receive(event: dict[str, Any]) -> None:
            bytes_of[event["requestId"]] = bytes_of.get(event["requestId"], 0) + event["encodedDataLength"]

        def finish(event: dict[str, Any]) -> None:
            bytes_of[event["requestId"]] = max(bytes_of.get(event["requestId"], 0), event["encodedDataLength"])

        line = self.context.new_cdp_session(self.page)
        line.on("Network.dataReceived", receive)
        line.on("Network.loadingFinished", finish)
        line.send("Network.enable")
        line.send("Network.setCacheDisabled", {"cacheDisabled": True})
        try:
            self.go(path)
            _catch_up(self.page)
        finally:
            line.detach()
        assert bytes_of, f"nothing was transferred for {path}"
        return int(sum(bytes_of.values()))

    def leave(self, picture: str | None = None) -> None:
        """Close the browser context, after a screenshot if ``picture`` names one."""
        if picture is not None:
            ARTIFACTS.mkdir(exist_ok=True)
            with suppress(Error):  # a crashed page has no screenshot
                self.page.screenshot(path=ARTIFACTS / f"{picture}.png", full_page=True)
        self.context.close()


def _catch_up(page: Page) -> None:
    """Wait until the events that the page has sent so far have been handled."""
    try:
        page.evaluate("0")
    except Error:  # it is navigating, or closed
        page.context.cookies()


def barriers(page: Page, **options: Any) -> list[str]:
    """The accessibility violations of the page, one per line; the options are axe's.

    Of a long table it looks at the first rows: the others are alike, and to look at fifty takes seconds.
    """
    if not page.evaluate("'axe' in window"):
        page.evaluate(Axe().axe_script)
    asked = {"resultTypes": ["violations"], "preload": False, "iframes": False, **options}
    found = page.evaluate(LOOK_AT, [{"exclude": [f"tbody tr:nth-child(n + {FIRST_ROWS + 1})"]}, asked])
    return [f"axe: {fault['id']} ({fault['impact']}): {fault['help']}: {_places(fault)}" for fault in found]


def _places(fault: dict[str, Any]) -> str:
    return ", ".join(str(node["target"]) for node in fault["nodes"][:5])


def sticks_out(page: Page) -> list[str]:
    """The elements that make the page wider than the window."""
    return [f"wider than the window: {part}" for part in page.evaluate(STICKS_OUT)]


@contextmanager
def visiting(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Callable[..., Visitor]]:
    """Creates visitors for a test; fails at its end if one has met a fault. A failed test leaves a screenshot."""
    visitors: list[Visitor] = []
    failed_before = request.session.testsfailed

    def visit(address: str, **options: Any) -> Visitor:
        visitors.append(Visitor(browser, address, **options))
        return visitors[-1]

    yield visit
    failed = request.session.testsfailed > failed_before
    faults = [fault for visitor in visitors for fault in visitor.faults]
    for number, visitor in enumerate(visitors):
        visitor.leave(f"failed-{_file_name(request.node.name)}-{number}" if failed or faults else None)
    assert not faults, "\n".join(["the pages had faults:", *faults])


def _file_name(name: str) -> str:
    return re.sub(r"[^\w-]+", "-", name)
