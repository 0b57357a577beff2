"""The Data Intake service on Flask, with blocking SQLAlchemy:

python examples/data_intake/flask_service.py --port 8000

An item and the key of its request are committed in one transaction: there is no moment at which one exists without
the other, whenever the process dies.
"""

from typing import Any

import items
import msgspec

try:
    from flask import Flask, Response, abort, jsonify, request
    from gunicorn.app.base import BaseApplication
    from sqlalchemy import create_engine
    from sqlalchemy.orm import Session

    engine = create_engine(items.url_for(is_async=False))
except ModuleNotFoundError as missing:
    items.without(missing, "flask gunicorn")

from semel import Once, current_claim
from semel.http.wsgi import IdempotencyMiddleware

once = Once(items.URL_OF_KEYS, policy=items.POLICY)
app = Flask(__name__)
app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, once, policy=items.POLICY, name="items")


@app.post("/api/v1/items")
def create_item() -> Response:
    """Create an item; with an Idempotency-Key, once."""
    try:
        new = msgspec.json.decode(request.data, type=items.NewItem)
    except msgspec.MsgspecError as error:
        abort(422, str(error))
    with Session(engine) as session:
        item = items.Item(sku=new.sku, title=new.title)
        session.add(item)
        session.flush()  # it has its id now
        answer = items.created(item)
        claim = current_claim(None)  # None: the request came without a key
        if claim is not None:
            once.on(session).complete(claim, answer)
        session.commit()
    return Response(answer.body, answer.status, {name.decode(): value.decode() for name, value in answer.headers})


@app.get("/api/v1/items/<int:number>")
def get_item(number: int) -> Response:
    """Show an item."""
    with Session(engine) as session:
        item = session.get(items.Item, number)
    if item is None:
        abort(404, "Item not found")
    return jsonify(item.json)


@app.get("/stats")
def stats() -> Response:
    """What became of the requests with a key."""
    return jsonify(items.shown(once.stats()))


@app.errorhandler(404)
@app.errorhandler(422)
def refuse(error: Any) -> tuple[Response, int]:
    """Say why not, as JSON."""
    return jsonify(detail=error.description), error.code


class Server(BaseApplication):
    """gunicorn with one process of several threads."""

    def __init__(self, address: str) -> None:
        self._address = address
        super().__init__()

    def load_config(self) -> None:
        """See BaseApplication."""
        for name, value in {"bind": self._address, "threads": 8, "control_socket_disable": True}.items():
            if name in self.cfg.settings:  # an older gunicorn has no control socket to disable
                self.cfg.set(name, value)

    def load(self) -> Flask:
        """Make ready what the app needs, in the process that serves it."""
        once.open()
        items.Table.metadata.create_all(engine)
        return app


if __name__ == "__main__":
    chosen = items.arguments("The Data Intake service on Flask.")
    Server(f"{chosen.host}:{chosen.port}").run()
