"""The Data Intake service on FastAPI, with async SQLAlchemy:

python examples/data_intake/fastapi_service.py --port 8000

An item and the key of its request are committed in one transaction: there is no moment at which one exists without
the other, whenever the process dies.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import items

try:
    import uvicorn
    from fastapi import FastAPI, HTTPException, Response
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    engine = create_async_engine(items.url_for(is_async=True))
except ModuleNotFoundError as missing:
    items.without(missing, "fastapi uvicorn 'sqlalchemy[asyncio]' aiosqlite")

from semel import AsyncOnce, current_claim
from semel.http.asgi import IdempotencyMiddleware

once = AsyncOnce(items.URL_OF_KEYS, policy=items.POLICY)


@asynccontextmanager
async def life(_: FastAPI) -> AsyncIterator[None]:
    """Open the keys, make the table, and close both at the end."""
    async with once:
        async with engine.begin() as conn:
            await conn.run_sync(items.Table.metadata.create_all)
        yield
    await engine.dispose()


app = FastAPI(title="Data Intake", lifespan=life)
app.add_middleware(IdempotencyMiddleware, once=once, policy=items.POLICY, name="items")


@app.post("/api/v1/items", status_code=201)
async def create_item(new: items.NewItem) -> Response:
    """Create an item; with an Idempotency-Key, once."""
    async with AsyncSession(engine) as session:
        item = items.Item(sku=new.sku, title=new.title)
        session.add(item)
        await session.flush()  # it has its id now
        answer = items.created(item)
        claim = current_claim(None)  # None: the request came without a key
        if claim is not None:
            await once.on(session).complete(claim, answer)
        await session.commit()
    return Response(answer.body, answer.status, {name.decode(): value.decode() for name, value in answer.headers})


@app.get("/api/v1/items/{number}")
async def get_item(number: int) -> dict[str, Any]:
    """Show an item."""
    async with AsyncSession(engine) as session:
        item = await session.get(items.Item, number)
    if item is None:
        raise HTTPException(404, "Item not found")
    return item.json


@app.get("/stats")
async def stats() -> dict[str, Any]:
    """What became of the requests with a key."""
    return items.shown(await once.stats())


if __name__ == "__main__":
    chosen = items.arguments("The Data Intake service on FastAPI.")
    uvicorn.run(app, host=chosen.host, port=chosen.port)
