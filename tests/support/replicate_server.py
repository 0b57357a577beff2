"""A server with the parts of Replicate's HTTP API that we use, over real HTTP, which can be made to fail.

Like Replicate, it lists predictions newest first, in pages, without their webhook URL, which only a single prediction
shows. There are no idempotency keys: two requests create two predictions.
"""

import base64
import hmac
import json
import secrets
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "r8_made_up_for_tests"
SECRET = "whsec_" + base64.b64encode(b"made up for tests, too").decode()
VERSION = "5c7d5dc6dd8bf75c1acaa8565735e7986bc5b66206b55cca93cb72c9bf15ccaa"
PATIENCE = 60.0


class Cut(Exception):
    """Close the connection without a response."""


class ReplicateServer:
    """Predictions in memory. ``faults`` has the faults of the next creations, by prompt."""

    def __init__(self) -> None:
        self.predictions: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []
        self.faults: dict[str, list[str]] = {}
        self.page = 100
        self.token = TOKEN
        self.secretive: set[str] = set()
        """Prompts of predictions that do not show their webhook URL."""
        self.unlisted: set[str] = set()
        """Ids of predictions that are not visible yet."""
        self.late: set[str] = set()
        """Prompts whose predictions are not visible at first."""
        self.stubborn: set[str] = set()
        """Prompts of predictions that do not end when they are cancelled."""
        self.asked: list[dict[str, str]] = []
        self.go_on = threading.Event()
        self.connections: set[socket.socket] = set()
        self._lock = threading.RLock()
        self._server: ThreadingHTTPServer | None = None
        self._port = 0
        self._start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def _start(self) -> None:
        kept = self

        class Handler(_Handler):
            server_of = kept

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

        self._server = Server(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.go_on.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Refuse connections until the end of the block."""
        self.close()
        self.go_on.clear()
        try:
            yield
        finally:
            self._start()

    def of(self, prompt: str) -> list[dict[str, Any]]:
        """The predictions with this prompt, oldest first."""
        return [each for each in list(self.predictions.values()) if each["input"].get("prompt") == prompt]

    def add(self, body: dict[str, Any], model: str | None = None, **more: Any) -> dict[str, Any]:
        """Create a prediction."""
        with self._lock:
            made = secrets.token_hex(13)
            if body["input"].get("prompt") in self.late:
                self.unlisted.add(made)
            now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
            self.predictions[made] = {
                "id": made,
                "model": model or "replicate/hello-world",
                "version": "hidden" if model else body["version"],
                "input": body["input"],
                "output": None,
                "error": None,
                "logs": "",
                "status": "starting",
                "source": "api",
                "data_removed": False,
                "created_at": now,
                "started_at": None,
                "completed_at": None,
                "metrics": {},
                "webhook": body.get("webhook"),
                "urls": {"get": f"{self.url}/v1/predictions/{made}"},
                **more,
            }
            return self.predictions[made]

    def finish(self, prompt: str, output: Any = "done", *, status: str = "succeeded", **more: Any) -> None:
        """End the newest prediction of the prompt, without calling back."""
        metrics = {"predict_time": 2.5}
        self.of(prompt)[-1].update({"output": output, "metrics": metrics, **more, "status": status})

    def call_back(self, prediction: dict[str, Any], **changed: Any) -> tuple[int, dict[str, Any]]:
        """Send a webhook as Replicate does, with the parts in ``changed`` replaced."""
        body = changed.get("body", json.dumps(prediction).encode())
        webhook_id = changed.get("webhook_id", f"msg_{secrets.token_hex(8)}")
        at = str(changed.get("at", int(time.time())))
        headers = {
            "content-type": "application/json",
            "webhook-id": webhook_id,
            "webhook-timestamp": at,
            "webhook-signature": changed.get("signature", signature(webhook_id, at, body)),
        }
        request = urllib.request.Request(changed.get("to", prediction["webhook"]), body, headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def answer(self, method: str, path: str, body: Any, sent: dict[str, str]) -> tuple[int, Any, dict[str, str]]:
        with self._lock:
            self.calls.append(f"{method} {urlsplit(path).path}")
            self.asked.append(sent)
        if sent.get("authorization") != f"Bearer {self.token}":
            return 401, {"title": "Unauthenticated", "detail": "You did not pass a valid token", "status": 401}, {}
        parts = urlsplit(path)
        names = parts.path.strip("/").split("/")
        match method, names:
            case "POST", ["v1", "predictions"]:
                return self._create(body, None)
            case "POST", ["v1", "models", owner, name, "predictions"]:
                return self._create(body, f"{owner}/{name}")
            case "GET", ["v1", "predictions"]:
                return self._list(parse_qs(parts.query))
            case "GET", ["v1", "predictions", which] if which in self.predictions.keys() - self.unlisted:
                shown = dict(self.predictions[which])
                if shown["input"].get("prompt") in self.secretive:
                    del shown["webhook"]
                return 200, shown, {}
            case "POST", ["v1", "predictions", which, "cancel"] if which in self.predictions:
                return self._cancel(which)
        return 404, {"title": "Not found", "detail": "The requested resource does not exist.", "status": 404}, {}

    def _create(self, body: Any, model: str | None) -> tuple[int, Any, dict[str, str]]:
        waiting = self.faults.get(body["input"].get("prompt"), [])
        fault = waiting.pop(0) if waiting else ""
        if model is None and "version" not in body:
            return 422, {"title": "Invalid", "detail": "version is required", "status": 422}, {}
        match fault:
            case "429":
                return 429, {"detail": "Request was throttled. Your rate limit resets in ~0s.", "status": 429}, {}
            case "402":
                return 402, {"title": "Insufficient credit", "detail": "You have no credit left.", "status": 402}, {}
            case "500 before":
                return 500, {"detail": "Internal server error"}, {}
        made = self.add(body, model)
        match fault:
            case "500 after":
                return 500, {"detail": "Internal server error"}, {}
            case "cut":
                raise Cut
            case "garbage":
                return 201, ["what?"], {}
            case "hold":
                self.go_on.wait(PATIENCE)
        return 201, dict(made), {}

    def _list(self, query: dict[str, list[str]]) -> tuple[int, Any, dict[str, str]]:
        found = [
            {name: value for name, value in each.items() if name not in ("webhook", "logs")}
            for each in reversed(self.predictions.values())
            if each["id"] not in self.unlisted
        ]
        start = int(query.get("cursor", ["0"])[0])
        end = start + self.page
        following = f"https://api.replicate.com/v1/predictions?cursor={end}" if end < len(found) else None
        return 200, {"previous": None, "next": following, "results": found[start:end]}, {}

    def _cancel(self, which: str) -> tuple[int, Any, dict[str, str]]:
        prediction = self.predictions[which]
        stubborn = prediction["input"].get("prompt") in self.stubborn
        if not stubborn and prediction["status"] in ("starting", "processing"):
            prediction["status"] = "canceled"
        return 200, dict(prediction), {}


def signature(webhook_id: str, at: str, body: bytes, secret: str = SECRET) -> str:
    key = base64.b64decode(secret.removeprefix("whsec_"))
    digest = hmac.digest(key, f"{webhook_id}.{at}.".encode() + body, "sha256")
    return "v1," + base64.b64encode(digest).decode()


class _Handler(BaseHTTPRequestHandler):
    server_of: ReplicateServer
    protocol_version = "HTTP/1.1"
    timeout = PATIENCE

    def _serve(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        content = self.rfile.read(length)
        if len(content) < length:  # the client died before it had sent everything
            self.close_connection = True
            return
        body = json.loads(content) if length else None
        sent = {name.lower(): value for name, value in self.headers.items()}
        try:
            status, answer, headers = self.server_of.answer(self.command, self.path, body, sent)
        except Cut:
            self.close_connection = True
            return
        content = json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"content-type": "application/json", "content-length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = _serve  # noqa: N815 -- as http.server looks for them

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def handle(self) -> None:
        self.server_of.connections.add(self.connection)
        with suppress(ConnectionError, TimeoutError):  # the client has disconnected
            super().handle()
        self.server_of.connections.discard(self.connection)
