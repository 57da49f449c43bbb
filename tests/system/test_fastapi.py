"""When FastAPI commits: a failed COMMIT must be a 500 and no job, which its default for `Depends` is not.

A real uvicorn, since only a real server tells what a client has read when the commit fails. Pins FastAPI's
behaviour too: whoever finds the test of its default red may take `scope="function"` out of the documents.
"""

import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import Depends, FastAPI
from shop import Order, send_receipt_async
from sqlalchemy import Engine, make_url
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from workers import execute, rows

from sqla_jobs import enqueue

pytestmark = pytest.mark.system


def application(url: str, **scope: Any) -> FastAPI:
    """One view that orders and enqueues; its dependency commits after the `yield`."""
    engine = create_async_engine(make_url(url).set(drivername="postgresql+psycopg"))

    async def get_session() -> AsyncIterator[AsyncSession]:
        async with AsyncSession(engine) as session, session.begin():
            yield session

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.dispose()

    app = FastAPI(lifespan=lifespan)

    @app.post("/orders")
    async def place_order(customer: str, session: AsyncSession = Depends(get_session, **scope)) -> int:  # noqa: B008
        session.add(order := Order(customer=customer))
        job = enqueue(session, send_receipt_async, order)
        await session.flush()
        return job.id

    return app


@contextmanager
def served(app: FastAPI) -> Iterator[httpx.Client]:
    """A client of the application behind a real server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with httpx.Client(base_url=url, trust_env=False, timeout=20) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join(20)


@pytest.fixture
def engine(engine: Engine) -> Engine:
    """On a database where an order of nobody is refused, at COMMIT and not before."""
    execute(
        engine,
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'nobody orders'; END $$",
    )
    execute(
        engine,
        "CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON orders DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW WHEN (NEW.customer = 'nobody') EXECUTE FUNCTION refuse()",
    )
    return engine


def committed(engine: Engine) -> tuple[int, int]:
    """How many orders, how many jobs."""
    [(orders,)] = rows(engine, "SELECT count(*) FROM orders")
    [(jobs,)] = rows(engine, "SELECT count(*) FROM background_jobs")
    return orders, jobs


def test_with_the_function_scope_a_failed_commit_is_a_500_and_no_job(
    database_url: str, engine: Engine
) -> None:
    with served(application(database_url, scope="function")) as client:
        answer = client.post("/orders", params={"customer": "nobody"})

    assert answer.status_code == 500
    assert committed(engine) == (0, 0)


def test_with_the_function_scope_a_good_commit_is_a_200_and_a_job(database_url: str, engine: Engine) -> None:
    with served(application(database_url, scope="function")) as client:
        answer = client.post("/orders", params={"customer": "Ada"})
        at_once = committed(engine)

    assert (answer.status_code, answer.json()) == (200, 1)
    assert at_once == (1, 1)


def test_with_the_default_scope_the_client_reads_200_and_nothing_is_committed(
    database_url: str, engine: Engine
) -> None:
    with served(application(database_url)) as client:
        answer = client.post("/orders", params={"customer": "nobody"})

    assert (answer.status_code, answer.json()) == (200, 1)
    assert committed(engine) == (0, 0)
