"""How to test views that enqueue, and tasks: `python -m pytest` in this folder.

Each test runs in one transaction that is rolled back at its end, whatever a view commits. No worker runs.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from app import create_app
from app.models import Activity, Job, Order, Receipt, db
from app.tasks import send_receipt
from flask import Flask
from flask.testing import FlaskClient
from sqlalchemy import select

from sqla_jobs.embedded import EmbeddedPostgres


@pytest.fixture(scope="session")
def application() -> Iterator[Flask]:
    """With every table, made once. `create_all` makes the jobs' tables complete, trigger included."""
    with EmbeddedPostgres(durable=False) as postgres:
        application = create_app({"SQLALCHEMY_DATABASE_URI": postgres.url(), "TESTING": True})
        with application.app_context():
            db.create_all()
        yield application
        with application.app_context():
            db.engine.dispose()


@pytest.fixture
def app(application: Flask) -> Iterator[Flask]:
    """Until the end of the test every `db.session` works inside one transaction, which is rolled back."""
    with application.app_context():
        engine, engines = db.engine, db.engines
        db.session.configure(join_transaction_mode="create_savepoint")  # commit() ends a savepoint only
    with engine.connect() as connection:
        transaction = connection.begin()
        engines[None] = connection  # what db.session binds to
        try:
            yield application
        finally:
            engines[None] = engine
            transaction.rollback()


@pytest.fixture
def client(app: Flask) -> FlaskClient:
    return app.test_client()


TEA = {"customer": "Ada", "item": "tea", "card": "4711"}


def test_an_order_enqueues_its_receipt(app: Flask, client: FlaskClient) -> None:
    answer = client.post("/orders", json=TEA)

    assert answer.status_code == 201
    with app.app_context():
        [job] = db.session.scalars(select(Job)).all()
        assert (job.kind, job.queue) == ("app.tasks.send_receipt", "mail")
        assert job.payload == {"order": answer.get_json()["order"]}


def test_a_declined_payment_leaves_no_order_and_no_job(app: Flask, client: FlaskClient) -> None:
    answer = client.post("/orders", json=TEA | {"card": "0000"})

    assert answer.status_code == 402
    with app.app_context():
        assert db.session.scalars(select(Order)).all() == []
        assert db.session.scalars(select(Job)).all() == []


def test_the_task_writes_a_receipt(app: Flask) -> None:
    with app.app_context():
        db.session.add(order := Order(customer="Ada", item="tea"))
        db.session.flush()

        context: Any = SimpleNamespace(session=db.session)
        send_receipt(context, order)  # a task is still a function

        [receipt] = db.session.scalars(select(Receipt)).all()
        assert receipt.text == f"The Tea Shop thanks Ada for order {order.id}: tea"
        assert db.session.scalars(select(Activity.text)).all() == [f"receipt for order {order.id} sent"]


def test_a_job_can_be_looked_up(client: FlaskClient) -> None:
    job = client.post("/orders", json=TEA).get_json()["job"]

    assert client.get(f"/jobs/{job}").get_json() == {"status": "ready", "attempts": 0, "error": None}
    assert client.get(f"/jobs/{job + 1}").status_code == 404
