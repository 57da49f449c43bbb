"""How to test views that enqueue, and tasks: `python -m pytest` in this folder.

Each test runs in one transaction that is rolled back at its end, whatever a view commits. No worker runs.
A deferred constraint is therefore not looked at: `SET CONSTRAINTS ALL IMMEDIATE` would ask for it.
"""

import logging
import os
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from httpx import ASGITransport, AsyncClient
from sqlalchemy import create_engine, select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from sqla_jobs.embedded import EmbeddedPostgres

os.environ.setdefault("DATABASE_URL", "postgresql://")  # app.database wants one; the tests use their own

from app.database import get_session
from app.main import app
from app.models import Base, Customer, Job, Order, Receipt
from app.tasks import send_receipt

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """A database with every table. `create_all` makes the jobs' tables complete, trigger included."""
    with EmbeddedPostgres(durable=False) as postgres:
        engine = create_engine(postgres.url())
        Base.metadata.create_all(engine)
        engine.dispose()
        yield postgres.url()


@pytest.fixture
async def session(url: str) -> AsyncIterator[AsyncSession]:
    """In one transaction, which is rolled back: commit() ends a savepoint only."""
    engine = create_async_engine(url)
    async with engine.connect() as connection:
        transaction = await connection.begin()
        async with AsyncSession(connection, join_transaction_mode="create_savepoint") as session:
            session.add(Customer(id=1, name="Ada"))
            await session.commit()
            yield session
        await transaction.rollback()
    await engine.dispose()


@pytest.fixture
async def client(session: AsyncSession) -> AsyncIterator[AsyncClient]:
    async def the_tests_session() -> AsyncIterator[AsyncSession]:
        async with session.begin():
            yield session

    app.dependency_overrides[get_session] = the_tests_session
    async with AsyncClient(transport=ASGITransport(app), base_url="http://shop") as client:
        yield client
    app.dependency_overrides.clear()


async def test_an_order_enqueues_its_receipt(session: AsyncSession, client: AsyncClient) -> None:
    answer = await client.post("/orders", json={"customer_id": 1, "item": "tea"})

    assert answer.status_code == 201
    job = (await session.scalars(select(Job))).one()
    assert (job.kind, job.queue) == ("app.tasks.send_receipt", "mail")
    assert job.payload == {"order": answer.json()["order"]}


async def test_a_refused_order_leaves_no_order_and_no_job(session: AsyncSession, client: AsyncClient) -> None:
    answer = await client.post("/orders", json={"customer_id": 1, "item": "coffee"})

    assert answer.status_code == 422
    assert (await session.scalars(select(Order))).all() == []
    assert (await session.scalars(select(Job))).all() == []


async def test_the_task_writes_a_receipt(session: AsyncSession) -> None:
    session.add(order := Order(customer_id=1, item="tea"))
    await session.flush()

    context: Any = SimpleNamespace(session=session, log=logging.getLogger())
    await send_receipt(context, order)  # a task is still a function

    assert (await session.scalars(select(Receipt.text))).all() == ["Ada, thank you for the tea"]
