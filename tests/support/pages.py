"""Tests pages of the dashboard without a browser: a client that keeps cookies, sends forms, and parses the HTML."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from typing import Any

import httpx
from sqlalchemy import Connection, Table, insert

from semel import App
from semel._concurrency.sync import run_sync
from semel.db.schema import attempts, run_counts, submitted, workers
from semel.runs.store import maintenance
from semel.runs.store.durations import CHARACTERS
from semel.runs.types import MICRO, TERMINAL, id_at, new_id
from support.databases import put_run
from support.service import TestServer, TokenClient

VOID = frozenset({"meta", "link", "input", "br", "hr", "img", "path", "circle", "rect", "line", "polyline"})


class Node:
    """An element of a page."""

    def __init__(self, tag: str, attributes: dict[str, str]) -> None:
        self.tag = tag
        self.attributes = attributes
        self.children: list[Node | str] = []

    def __getitem__(self, name: str) -> str:
        return self.attributes[name]

    def get(self, name: str) -> str | None:
        return self.attributes.get(name)

    @property
    def classes(self) -> list[str]:
        return self.attributes.get("class", "").split()

    @property
    def text(self) -> str:
        """The visible text, on one line."""
        return " ".join("".join(self._pieces()).split())

    def _pieces(self) -> Iterator[str]:
        for child in self.children:
            if isinstance(child, str):
                yield child
            else:
                yield " "
                yield from child._pieces()
                yield " "

    def walk(self) -> Iterator["Node"]:
        for child in self.children:
            if isinstance(child, Node):
                yield child
                yield from child.walk()

    def all(self, tag: str | None = None, **attributes: str) -> list["Node"]:
        """Elements of that tag with these attributes; ``class_`` is one of the classes, ``_`` stands for ``-``."""
        return [each for each in self.walk() if _fits(each, tag, attributes)]

    def one(self, tag: str | None = None, **attributes: str) -> "Node":
        """The only such element; fails if there is none, or several."""
        found = self.all(tag, **attributes)
        assert len(found) == 1, f"{len(found)} elements are {tag} {attributes}"
        return found[0]

    def rows(self) -> list[list[str]]:
        """The texts of a table's cells, by row."""
        return [[cell.text for cell in row.all("td")] for row in self.one("tbody").all("tr")]


def _fits(node: Node, tag: str | None, attributes: dict[str, str]) -> bool:
    if tag is not None and node.tag != tag:
        return False
    for name, value in attributes.items():
        if name == "class_":
            if value not in node.classes:
                return False
        elif node.attributes.get(name.rstrip("_").replace("_", "-")) != value:
            return False
    return True


class Page:
    """A parsed page, with its response."""

    def __init__(self, answer: httpx.Response) -> None:
        self.answer = answer
        self.root = parsed(answer.text)

    @property
    def status(self) -> int:
        return self.answer.status_code

    @property
    def path(self) -> str:
        return self.answer.url.path

    @property
    def text(self) -> str:
        return self.root.one("main").text

    def all(self, tag: str | None = None, **attributes: str) -> list[Node]:
        return self.root.all(tag, **attributes)

    def one(self, tag: str | None = None, **attributes: str) -> Node:
        return self.root.one(tag, **attributes)


class _Tree(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Node("", {})
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {name: value or "" for name, value in attrs})
        self._open[-1].children.append(node)
        if tag not in VOID:
            self._open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].children.append(Node(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self._open[-1].tag == tag, f"</{tag}> closes <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)


def parsed(html: str) -> Node:
    """The tree of some HTML; fails if an element is not closed."""
    tree = _Tree()
    tree.feed(html)
    tree.close()
    assert len(tree._open) == 1, f"<{tree._open[-1].tag}> is never closed"
    return tree.root


class Browser:
    """Opens pages as a browser does: keeps cookies, follows redirects, and sends forms with the CSRF secret."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client

    def open(self, path: str, **options: Any) -> Page:
        """The page at the path."""
        return Page(self.client.get(path, **options))

    def send(self, path: str, fields: Any = None, **options: Any) -> Page:
        """Send a form with these fields and the CSRF secret to the path, as a page would."""
        given = fields or {}
        form = [(name, value) for name, several in _pairs(given) for value in several]
        headers = {"Origin": str(self.client.base_url).rstrip("/"), **options.pop("headers", {})}
        data: dict[str, Any] = {"csrf": [self.csrf]}
        for name, value in form:
            data.setdefault(name, []).append(value)
        return Page(self.client.post(path, data=data, headers=headers, **options))

    @property
    def csrf(self) -> str:
        """The CSRF secret of this browser; opens a page if there is none yet."""
        if "semel_csrf" not in self.client.cookies:
            self.client.get("/ui/sign-in")
            if "semel_csrf" not in self.client.cookies:
                self.client.get("/")
        return self.client.cookies["semel_csrf"]

    def sign_in(self, secret: str | None, onward: str = "") -> Page:
        return self.send("/ui/sign-in", {"token": secret or "", "next": onward})

    def events(self, path: str, **options: Any) -> Any:
        """A stream of server-sent events: ``with browser.events(...) as answer``; :func:`listening` parses them."""
        return self.client.stream("GET", path, **options)


def _pairs(fields: Any) -> list[tuple[str, list[str]]]:
    pairs = fields.items() if isinstance(fields, dict) else fields
    return [(name, value if isinstance(value, list) else [value]) for name, value in pairs]


class Event:
    """A server-sent event, and the elements in it."""

    def __init__(self, kind: str, data: str) -> None:
        self.kind = kind
        self.html = data
        self.root = parsed(data)

    @property
    def ids(self) -> list[str]:
        """The ids of the elements that it replaces."""
        return [each["id"] for each in self.root.children if isinstance(each, Node)]

    def text(self, part: str) -> str | None:
        """The text of the element with this id; None if the event does not have it."""
        found = self.root.all(id=part)
        return found[0].text if found else None


@contextmanager
def listening(client: httpx.Client, path: str) -> Iterator[Iterator[Event]]:
    """The events of a stream as they arrive; fails if the next one takes too long."""
    with client.stream("GET", path) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield _events(answer)


def _events(answer: httpx.Response) -> Iterator[Event]:
    kind, data = "", []
    for line in answer.iter_lines():
        name, _, value = line.partition(": ")
        if line == "" and kind:
            yield Event(kind, "\n".join(data))
            kind, data = "", []
        elif name == "event":
            kind = value
        elif name == "data":
            data.append(value)


def made_run(at: float, **fields: Any) -> dict[str, Any]:
    """The row of a run that was submitted ``at`` seconds ago; other times are also given as seconds ago."""
    now = time.time_ns() // 1000
    created = now - round(at * MICRO)
    times = {f"{name}_us": now - round(fields.pop(name) * MICRO) for name in TIMES if fields.get(name) is not None}
    status = fields.get("status", "SUCCEEDED")
    if status in TERMINAL:
        times = {"started_us": created, "finished_us": created} | times
    made = {
        "id": id_at(created)[:14] + new_id()[14:],
        "tenant": "",
        "user_id": "root",
        "model": "add",
        "queue": "default",
        "priority": 0,
        "status": status,
        "ready": True,
        "step": status.lower(),
        "version": 1 if status == "PENDING" else 2,
        "changed_us": created,
        "fence": 1,
        "attempts": 0 if status == "PENDING" else 1,
        "errors": 0,
        "losts": 0,
        "max_attempts": 3,
        "max_lost": 3,
        "parameters": "{}",
        "payload_hash": "0" * 64,
        "cost": 0,
        "asked_cost": 0,
        "created_us": created,
        "due_us": created,
        "lease_us": 30 * MICRO,
    }
    return made | times | fields


TIMES = ("due", "started", "finished", "lease_until")


def put_runs(app: App, made: list[dict[str, Any]]) -> list[str]:
    """Insert rows of runs, so that a test controls all times; returns their ids."""
    ledger = app.ledger(awaited=False)
    try:
        run_sync(ledger.write(_put_runs, made))
    finally:
        run_sync(ledger.close())
    return [each["id"] for each in made]


def _put_runs(conn: Connection, made: list[dict[str, Any]]) -> None:
    for each in made:
        put_run(conn, each)


def put_ended_runs(app: App, made: list[dict[str, Any]]) -> None:
    """As :func:`put_runs`, for thousands of runs that have ended: they also count for the page of their model."""
    for each in made:
        took = each["finished_us"] - each["started_us"]
        ms = str(took // 1000)
        counted = {"facet": None, "count": 1, "spent_us": took, "durations": CHARACTERS[9 * (len(ms) - 1) + int(ms[0])]}
        each |= {"run_id": each["id"], "began_us": each["started_us"], "ended_us": each["finished_us"], **counted}
    ledger = app.ledger(awaited=False)
    try:
        for table in (submitted, attempts, run_counts):
            run_sync(ledger.write(_insert_many, table, made))
        run_sync(ledger.write(maintenance.add_up, ledger.statement_context))
    finally:
        run_sync(ledger.close())


def _insert_many(conn: Connection, table: Table, made: list[dict[str, Any]]) -> None:
    given = made[0].keys() & set(table.c.keys())
    conn.execute(insert(table), [{name: row.get(name) for name in given} for row in made])


def put_workers(app: App, made: list[dict[str, Any]]) -> None:
    """Insert rows of workers; ``seen`` and ``started`` are seconds ago."""
    now = time.time_ns() // 1000
    rows = []
    for each in made:
        given = dict(each)
        seen = {"seen_us": now - round(given.pop("seen", 0) * MICRO), "started_us": now - 3600 * MICRO}
        row = {"host": "house", "pid": 7, "queues": '["default"]', "models": "{}", "slots": "{}", "draining": False}
        rows.append(row | seen | {"name": given["id"]} | given)
    ledger = app.ledger(awaited=False)
    try:
        run_sync(ledger.write(_insert, workers, rows))
    finally:
        run_sync(ledger.close())


def put_rows(app: App, table: Table, *rows: dict[str, Any]) -> None:
    """Insert rows into a table."""
    ledger = app.ledger(awaited=False)
    try:
        run_sync(ledger.write(_insert, table, list(rows)))
    finally:
        run_sync(ledger.close())


def _insert(conn: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        conn.execute(insert(table).values(**row))


@contextmanager
def browser(service: TestServer, person: TokenClient | str | None = None) -> Iterator[Browser]:
    """A new browser, signed in with the token if one is given."""
    with service.client(follow_redirects=True, verify=False) as client:
        made = Browser(client)
        secret = person.secret if isinstance(person, TokenClient) else person
        if secret is not None:
            page = made.sign_in(secret)
            assert page.status == 200, page.text
            assert page.path == "/", page.path
        yield made


__all__ = [
    "Browser",
    "Event",
    "Node",
    "Page",
    "browser",
    "listening",
    "made_run",
    "parsed",
    "put_ended_runs",
    "put_rows",
    "put_runs",
    "put_workers",
]
