"""What both services share: the table of items, their JSON, and the settings."""

import argparse
import logging
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn

from sqlalchemy import URL, make_url
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from semel import Policy, Response, Stats

URL_OF_KEYS = os.environ.get("DATA_INTAKE_URL", "sqlite:///data_intake.db")
"""Where keys and items live, side by side: a SQLite file, or postgresql://… after ``semel migrate``."""

POLICY = Policy.intake().but(lease=float(os.environ.get("DATA_INTAKE_LEASE", "30")))
"""One hour for a key. The lease is short and renewed while a request is handled: it is how long a crash is felt."""

DRIVERS = {"sqlite": ("pysqlite", "aiosqlite"), "postgresql": ("psycopg", "asyncpg")}


class Table(DeclarativeBase):
    """The tables of the service; those of the keys are semel's own."""


class Item(Table):
    """An item that somebody sent in."""

    __tablename__ = "items"

    id: Mapped[int] = mapped_column(primary_key=True)
    sku: Mapped[str]
    title: Mapped[str]
    created_at: Mapped[str] = mapped_column(default=lambda: datetime.now(UTC).isoformat())

    @property
    def json(self) -> dict[str, Any]:
        """What a client gets to see."""
        return {"id": self.id, "sku": self.sku, "title": self.title, "created_at": self.created_at}


@dataclass
class NewItem:
    """What a client sends."""

    sku: str
    title: str

    def __post_init__(self) -> None:
        if not self.sku or not self.title:
            raise ValueError("sku and title must not be empty")


def created(item: Item) -> Response:
    """The answer to a POST, as the client gets it and as it is stored with the key."""
    answer = Response.json(item.json, 201)
    return Response(201, [*answer.headers, (b"location", f"/api/v1/items/{item.id}".encode())], answer.body)


def url_for(*, is_async: bool) -> URL:
    """The URL with the driver that SQLAlchemy takes for the items."""
    url = make_url(URL_OF_KEYS)
    return url.set(drivername=f"{url.get_backend_name()}+{DRIVERS[url.get_backend_name()][is_async]}")


def shown(stats: Stats) -> dict[str, Any]:
    """What became of the requests with a key since the start of this process, and what the store holds now."""
    held = {"keys": stats.held.live, "cleanup": stats.purged, "warnings": stats.warnings}
    counts = stats.scopes.get("items")
    if counts is None:
        return held
    return {
        "hit": counts.hits,
        "miss": sum(counts.misses.values()),
        "conflict": counts.conflicts,
        "processing_collision": counts.collisions,
        "hit_rate": round(counts.hit_rate, 3),
        "hit_rate_is": counts.hit_rate_is,
        **held,
    }


def arguments(description: str) -> argparse.Namespace:
    """The command line of both services; every verdict on a key is logged from here on."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="on which port (8000)")
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("semel").setLevel(logging.DEBUG)
    return parser.parse_args()


def without(missing: ModuleNotFoundError, packages: str) -> NoReturn:
    """End with a word on what to install."""
    needs = f"this service needs: pip install semel {packages} (and 'semel[postgres]' for PostgreSQL)"
    raise SystemExit(f"{str(missing.name).partition('.')[0]} is not installed; {needs}")
