"""Enqueue on a real database: a job exists if and only if its transaction committed, and as it was called.

What is in the tables is read by plain SQL on a connection of its own.
"""

import asyncio
import inspect
import subprocess
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from enum import IntEnum, StrEnum
from typing import Any

import pytest
import shop
from shop import Job, Order
from sqlalchemy import (
    Engine,
    ForeignKey,
    create_engine,
    event,
    func,
    insert,
    literal_column,
    make_url,
    select,
    text,
)
from sqlalchemy.exc import DBAPIError, IntegrityError, InvalidRequestError
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
)
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    mapped_column,
    object_session,
    relationship,
    scoped_session,
    sessionmaker,
)

import sqla_jobs
from sqla_jobs.embedded import EmbeddedPostgres, find_binaries
from sqla_jobs.errors import ArgumentError, ConfigurationError, NotFlushed, PayloadError, SqlaJobsError
from sqla_jobs.models import JobMixin
from sqla_jobs.outbox import Enqueued
from sqla_jobs.tasks import Jobs, Task, enqueue

Row = dict[str, Any]

# -- a second application, with keys of every sort and Job classes in other places


class Base(DeclarativeBase):
    pass


class Errand(JobMixin, Base):
    """A second Job class in one database, with a column of the user's."""

    __tablename__ = "errands"

    tracking: Mapped[uuid.UUID] = mapped_column(default=uuid.uuid4, server_default=func.gen_random_uuid())


class OfficeJob(JobMixin, Base):
    """In a schema whose name needs quotes."""

    __tablename__ = "jobs"
    __table_args__ = {"schema": "back office"}  # noqa: RUF012 - SQLAlchemy's


class Parcel(Base):
    __tablename__ = "parcels"

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, default=uuid.uuid4)


class Seat(Base):
    __tablename__ = "seats"

    row: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)


class Person(Base):
    __tablename__ = "people"
    __mapper_args__ = {"polymorphic_on": "role", "polymorphic_identity": "person"}  # noqa: RUF012

    id: Mapped[int] = mapped_column(primary_key=True)
    role: Mapped[str]


class Manager(Person):
    __tablename__ = "managers"
    __mapper_args__ = {"polymorphic_identity": "manager"}  # noqa: RUF012

    id: Mapped[int] = mapped_column(ForeignKey(Person.id), primary_key=True)


class Passport(Base):
    __tablename__ = "passports"

    person_id: Mapped[int] = mapped_column(ForeignKey(Person.id), primary_key=True)
    person: Mapped[Person] = relationship()


class Code(Base):
    """A natural key that a listener puts in order."""

    __tablename__ = "codes"

    code: Mapped[str] = mapped_column(primary_key=True)


@event.listens_for(Code, "before_insert")
def _lower(mapper: object, connection: object, target: Code) -> None:
    target.code = target.code.lower()


jobs = Jobs(Job)
errands = Jobs(Errand)
office = Jobs(OfficeJob)
ready_made = Jobs()


@jobs.task(name="send")
def send(it: Order, note: str | None = None) -> None: ...


@jobs.task(name="send_parcel")
def send_parcel(it: Parcel) -> None: ...


@jobs.task(name="keep_seat")
def keep_seat(it: Seat) -> None: ...


@jobs.task(name="greet")
def greet(it: Person) -> None: ...


@jobs.task(name="stamp")
def stamp(it: Passport) -> None: ...


@jobs.task(name="redeem")
def redeem(it: Code) -> None: ...


@jobs.task(name="send_all")
def send_all(orders: list[Order]) -> None: ...


@jobs.task(name="count")
def count(value: int) -> None: ...


@jobs.task(name="keep")
def keep(value: Any) -> None: ...


@errands.task(name="run")
def run(value: int) -> None: ...


@office.task(name="file")
def file(value: int) -> None: ...


@ready_made.task(name="ready")
def ready(value: int) -> None: ...


# -- the database

JOBS = "background_jobs"
TABLES = [JOBS, "errands", '"back office".jobs', "sqla_jobs", "receipts", "orders", "parcels", "seats"]
TABLES += ["passports", "managers", "people", "codes"]


@pytest.fixture(scope="session")
def template(server: EmbeddedPostgres) -> str:
    """The tables of both applications, and the ready-made ones."""
    engine = create_engine(_psycopg(server.create_database("template_outbox")))
    with engine.begin() as connection:
        connection.execute(text('CREATE SCHEMA "back office"'))
        shop.Base.metadata.create_all(connection)
        Base.metadata.create_all(connection)
        ours = vars(type(ready_made.tables))["__dataclass_fields__"]
        tables = [getattr(ready_made.tables, name) for name in ours if name != "classes"]
        sqla_jobs.metadata.create_all(connection, tables=tables)
    engine.dispose()
    return "template_outbox"


@pytest.fixture(scope="session")
def cleaner(server: EmbeddedPostgres, template: str) -> Iterator[Engine]:
    """One database for all tests here: a database each would take ten times as long as the tests."""
    engine = create_engine(_psycopg(server.create_database("outbox", template=template)))
    yield engine
    engine.dispose()
    server.drop_database("outbox")


@pytest.fixture
def database_url(cleaner: Engine) -> Iterator[str]:
    """The one database, emptied after the test."""
    yield cleaner.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with cleaner.begin() as connection:
        connection.execute(text("SET LOCAL lock_timeout = '5s'"))
        for table in TABLES:
            connection.execute(text(f"DELETE FROM {table}"))


@pytest.fixture
def own_engine(server: EmbeddedPostgres, template: str) -> Iterator[Engine]:
    """A database of the test's own, whose tables it may alter."""
    engine = create_engine(_psycopg(server.create_database("outbox_of_one_test", template=template)))
    yield engine
    engine.dispose()
    server.drop_database("outbox_of_one_test")


def _psycopg(url: str) -> str:
    return make_url(url).set(drivername="postgresql+psycopg").render_as_string(hide_password=False)


def rows(engine: Engine, table: str = JOBS) -> list[Row]:
    """What others see, in the order of the ids."""
    with engine.connect() as connection:
        return [
            dict(row) for row in connection.execute(text(f"SELECT * FROM {table} ORDER BY id")).mappings()
        ]


def payloads(engine: Engine, table: str = JOBS) -> list[Any]:
    return [row["payload"] for row in rows(engine, table)]


def scalar(engine: Engine, statement: str) -> Any:
    with engine.connect() as connection:
        return connection.scalar(text(statement))


def execute(engine: Engine, statement: str) -> None:
    with engine.begin() as connection:
        connection.execute(text(statement))


@contextmanager
def listening(target: Any, name: str, listener: Callable[..., None], **options: Any) -> Iterator[None]:
    """A listener of the user's, for a while."""
    event.listen(target, name, listener, **options)
    try:
        yield
    finally:
        event.remove(target, name, listener)


@contextmanager
def statements(engine: Engine | AsyncEngine) -> Iterator[list[str]]:
    """Every text that is sent."""
    seen: list[str] = []

    def note(
        connection: object, cursor: object, statement: str, parameters: object, context: object, many: bool
    ) -> None:
        seen.append(statement)

    with listening(
        engine.sync_engine if isinstance(engine, AsyncEngine) else engine, "before_cursor_execute", note
    ):
        yield seen


def inserts(seen: Sequence[str], table: str = JOBS) -> list[str]:
    return [statement for statement in seen if statement.startswith(f"INSERT INTO {table} ")]


# -- one body for four kinds of session


async def done(result: Any) -> Any:
    """The result of a method that some kinds of session make a coroutine of."""
    return await result if inspect.isawaitable(result) else result


def plain(session: Any) -> Session:
    """The Session inside."""
    session = getattr(session, "registry", lambda: session)()
    inner: Session = getattr(session, "sync_session", session)
    return inner


@asynccontextmanager
async def entered(manager: Any) -> AsyncIterator[Any]:
    """The same for `with`."""
    if hasattr(manager, "__aenter__"):
        async with manager as it:
            yield it
    else:
        with manager as it:
            yield it


@pytest.fixture(params=["Session", "AsyncSession", "scoped_session", "async_scoped_session"])
async def session(
    request: pytest.FixtureRequest, engine: Engine, async_engine: AsyncEngine
) -> AsyncIterator[Any]:
    """A session of every kind, with the settings that SQLAlchemy gives it."""
    made: Any
    match request.param:
        case "Session":
            made = Session(engine)
        case "AsyncSession":
            made = AsyncSession(async_engine)
        case "scoped_session":
            made = scoped_session(sessionmaker(engine))
        case "async_scoped_session":
            made = async_scoped_session(async_sessionmaker(async_engine), scopefunc=asyncio.current_task)
    yield made
    await done(made.remove() if hasattr(made, "remove") else made.close())


@pytest.fixture
def sync(engine: Engine) -> Iterator[Session]:
    """A plain Session, for what does not depend on the kind."""
    with Session(engine) as made:
        yield made


# -- a job exists if and only if its transaction committed


async def test_a_job_appears_with_the_commit_and_not_before(session: Any, engine: Engine) -> None:
    enqueue(session, count, 1)
    await done(session.flush())
    before = payloads(engine)

    await done(session.commit())

    assert before == []
    assert payloads(engine) == [{"value": 1}]


async def test_a_rollback_leaves_no_job_flushed_or_not(session: Any, engine: Engine) -> None:
    enqueue(session, count, 1)
    await done(session.flush())
    enqueue(session, count, 2)

    await done(session.rollback())
    await done(session.commit())

    assert payloads(engine) == []


async def test_an_exception_in_a_begin_block_leaves_no_job(session: Any, engine: Engine) -> None:
    async def request() -> None:
        async with entered(session.begin()):
            enqueue(session, count, 1)
            await done(session.flush())
            enqueue(session, count, 2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await request()

    assert payloads(engine) == []


async def test_a_job_and_the_row_beside_it_share_their_fate(session: Any, engine: Engine) -> None:
    async with entered(session.begin()):
        session.add(order := Order(customer="Ada"))
        enqueue(session, send, order)

    session.add(order := Order(customer="Bob"))
    enqueue(session, send, order)
    await done(session.rollback())

    assert len(payloads(engine)) == 1
    assert scalar(engine, "SELECT array_agg(customer) FROM orders") == ["Ada"]


async def test_enqueue_alone_in_a_session_is_committed(session: Any, engine: Engine) -> None:
    async with entered(session.begin()):
        enqueue(session, count, 1)

    assert payloads(engine) == [{"value": 1}]


async def test_a_session_goes_on_after_a_commit_and_after_a_rollback(session: Any, engine: Engine) -> None:
    enqueue(session, count, 1)
    await done(session.commit())
    enqueue(session, count, 2)
    await done(session.rollback())
    enqueue(session, count, 3)
    await done(session.commit())

    assert payloads(engine) == [{"value": 1}, {"value": 3}]


@pytest.mark.parametrize("flushed", [False, True], ids=["unflushed", "flushed"])
async def test_a_rolled_back_savepoint_takes_its_jobs_and_no_others(
    session: Any, engine: Engine, flushed: bool
) -> None:
    enqueue(session, count, 1)
    inner = await done(session.begin_nested())
    enqueue(session, count, 2)
    session.add(order := Order(customer="Ada"))
    enqueue(session, send, order)
    if flushed:
        await done(session.flush())
    await done(inner.rollback())
    enqueue(session, count, 3)
    await done(session.commit())

    assert payloads(engine) == [{"value": 1}, {"value": 3}]


async def test_a_released_savepoint_keeps_its_jobs(session: Any, engine: Engine) -> None:
    async with entered(session.begin()):
        outer = enqueue(session, count, 1)
        async with entered(session.begin_nested()):
            inner = enqueue(session, count, 2)
        released = inner.id

    assert [row["id"] for row in rows(engine)] == [outer.id, released]
    assert payloads(engine) == [{"value": 1}, {"value": 2}]


async def test_of_nested_savepoints_what_is_released_into_a_rolled_back_one_is_gone(
    session: Any, engine: Engine
) -> None:
    async with entered(session.begin()):
        enqueue(session, count, 1)
        middle = await done(session.begin_nested())
        enqueue(session, count, 2)
        async with entered(session.begin_nested()):
            enqueue(session, count, 3)
        await done(middle.rollback())
        async with entered(session.begin_nested()):
            enqueue(session, count, 4)
            innermost = await done(session.begin_nested())
            enqueue(session, count, 5)
            await done(innermost.rollback())
            enqueue(session, count, 6)

    assert payloads(engine) == [{"value": 1}, {"value": 4}, {"value": 6}]


async def test_an_error_in_a_savepoint_leaves_the_transaction_and_its_jobs(
    session: Any, engine: Engine
) -> None:
    execute(engine, "INSERT INTO orders (id, customer) VALUES (1, 'Ada')")

    async def attempt() -> None:
        async with entered(session.begin_nested()):
            session.add(Order(id=1, customer="Bob"))
            enqueue(session, count, 2)

    async with entered(session.begin()):
        enqueue(session, count, 1)
        with pytest.raises(IntegrityError):
            await attempt()
        enqueue(session, count, 3)

    assert payloads(engine) == [{"value": 1}, {"value": 3}]


@pytest.mark.parametrize("drop", ["expunge_all", "close"])
async def test_what_empties_the_session_drops_its_unflushed_jobs(
    session: Any, engine: Engine, drop: str
) -> None:
    enqueue(session, count, 1)
    await done(getattr(session, drop)())
    enqueue(session, count, 2)
    await done(session.commit())

    assert payloads(engine) == [{"value": 2}]


@pytest.mark.parametrize("reference", [False, True], ids=["plain", "pending entity"])
async def test_after_a_failed_flush_and_a_rollback_the_same_again_makes_one_job(
    session: Any, engine: Engine, reference: bool
) -> None:
    execute(engine, "INSERT INTO orders (id, customer) VALUES (1, 'Ada')")

    def attempt(id_: int) -> None:
        session.add(order := Order(id=id_, customer="Bob"))
        enqueue(session, send, order) if reference else enqueue(session, count, 1)

    attempt(1)
    with pytest.raises(IntegrityError):
        await done(session.commit())
    await done(session.rollback())
    attempt(2)
    await done(session.commit())

    assert payloads(engine) == [{"it": 2} if reference else {"value": 1}]
    assert plain(session).info == {}


async def test_a_session_that_only_ever_rolls_back_keeps_nothing_of_the_jobs(session: Any) -> None:
    for value in range(50):
        enqueue(session, count, value)
        await done(session.rollback())

    enqueue(session, count, 50)

    assert [len(kept) for kept in plain(session).info.values()] == [1]


def test_the_outer_transaction_of_a_test_suite_takes_committed_jobs_back(engine: Engine) -> None:
    with engine.connect() as connection, connection.begin() as outer:
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            handle = enqueue(session, count, 1)
            session.commit()
            seen = session.scalars(select(Job.id)).all()
        outer.rollback()

    assert seen == [handle.id]
    assert payloads(engine) == []


async def test_run_sync_is_a_way_in_too(async_engine: AsyncEngine, engine: Engine) -> None:
    async with AsyncSession(async_engine) as session, session.begin():
        await session.run_sync(lambda inner: enqueue(inner, count, 1))

    assert payloads(engine) == [{"value": 1}]


def test_a_two_phase_transaction_is_prepared_and_then_committed(engine: Engine) -> None:
    with Session(engine, twophase=True) as session:
        session.add(order := Order(customer="Ada"))
        enqueue(session, send, order)
        enqueue(session, count, 1)
        session.prepare()
        prepared = payloads(engine)
        session.commit()

    assert prepared == []
    assert len(payloads(engine)) == 2


def test_a_prepared_transaction_that_is_rolled_back_leaves_no_job(engine: Engine) -> None:
    with Session(engine, twophase=True) as session:
        enqueue(session, count, 1)
        session.prepare()
        session.rollback()

    assert payloads(engine) == []


# -- no commit passes without its jobs


@pytest.mark.parametrize("way_out", ["add", "rollback"])
async def test_an_entity_that_was_never_added_is_refused_by_every_flush_until_it_is(
    session: Any, engine: Engine, way_out: str
) -> None:
    order = Order(customer="Ada")
    refusal = r"argument it: the Order is not in the session.*session\.add\(\) it.*or roll back"
    session.add(Order(customer="Bob"))
    enqueue(session, count, 1)
    enqueue(session, send, order)

    for end in (session.flush, session.commit, session.commit):
        with pytest.raises(PayloadError, match=refusal) as refused:
            await done(end())
        assert refused.value.path == "it"
    if way_out == "add":
        session.add(order)
    else:
        await done(session.rollback())
    await done(session.commit())

    added = way_out == "add"
    expected = [{"value": 1}, {"it": scalar(engine, "SELECT id FROM orders WHERE customer = 'Ada'")}]
    assert payloads(engine) == (expected if added else [])
    assert scalar(engine, "SELECT count(*) FROM orders") == (2 if added else 0)


def test_an_entity_that_waits_in_another_session_is_refused(engine: Engine, sync: Session) -> None:
    with Session(engine) as other:
        other.add(order := Order(customer="Ada"))
        enqueue(sync, send, order)

        with pytest.raises(PayloadError, match="argument it: the Order is pending in another session"):
            sync.commit()


def test_a_refused_entity_is_named_by_its_path(sync: Session) -> None:
    sync.add(first := Order(customer="Ada"))
    enqueue(sync, send_all, [first, Order(customer="Bob")])

    with pytest.raises(PayloadError, match=r"argument orders\[1\]: the Order"):
        sync.commit()


async def test_a_listener_that_stops_the_flush_once_loses_no_job(session: Any, engine: Engine) -> None:
    session.add(order := Order(customer=""))
    enqueue(session, send, order)
    enqueue(session, count, 1)

    def validate(flushing: Session, context: object, instances: object) -> None:
        if order.customer == "":
            raise ValueError("an order needs a customer")

    with listening(plain(session), "before_flush", validate):
        with pytest.raises(ValueError, match="needs a customer"):
            await done(session.flush())
        order.customer = "Ada"
        await done(session.commit())

    assert payloads(engine) == [{"it": scalar(engine, "SELECT id FROM orders")}, {"value": 1}]


def test_a_listener_that_stops_the_flush_and_a_rollback_leave_no_job(sync: Session, engine: Engine) -> None:
    def stop(flushing: Session, context: object, instances: object) -> None:
        raise ValueError("stop")

    sync.add(order := Order(customer="Ada"))
    enqueue(sync, send, order)
    with listening(sync, "before_flush", stop), pytest.raises(ValueError, match="stop"):
        sync.flush()
    sync.rollback()
    enqueue(sync, count, 1)
    sync.commit()

    assert payloads(engine) == [{"value": 1}]


def test_a_savepoint_rolled_back_after_a_stopped_flush_takes_its_jobs(sync: Session, engine: Engine) -> None:
    def stop(flushing: Session, context: object, instances: object) -> None:
        raise ValueError("stop")

    sync.add(Order(customer="Ada"))
    savepoint = sync.begin_nested()
    sync.add(order := Order(customer="Bob"))
    enqueue(sync, send, order)
    with listening(sync, "before_flush", stop), pytest.raises(ValueError, match="stop"):
        sync.flush()
    savepoint.rollback()
    sync.commit()

    assert payloads(engine) == []
    assert scalar(engine, "SELECT array_agg(customer) FROM orders") == ["Ada"]


def test_jobs_whose_entity_left_after_a_stopped_flush_still_stop_the_commit(
    sync: Session, engine: Engine
) -> None:
    def stop(flushing: Session, context: object, instances: object) -> None:
        raise ValueError("stop")

    sync.add(order := Order(customer="Ada"))
    enqueue(sync, count, 1)
    enqueue(sync, send, order)
    with listening(sync, "before_flush", stop), pytest.raises(ValueError, match="stop"):
        sync.flush()
    sync.expunge(order)

    with pytest.raises(PayloadError, match="the Order is not in the session"):
        sync.commit()


def test_a_commit_after_a_refused_insert_is_an_error_and_no_silent_rollback(
    own_engine: Engine,
) -> None:
    execute(own_engine, "ALTER TABLE background_jobs ADD CHECK (priority < 5)")
    with Session(own_engine) as session:
        session.add(Order(customer="Ada"))
        enqueue(session, count.using(priority=9), 1)
        with pytest.raises(IntegrityError):
            session.flush()

        with pytest.raises(DBAPIError, match="current transaction is aborted"):
            session.commit()


# -- entities travel as their identity

ENTITIES: dict[str, tuple[Callable[[], Any], Task[Any], str]] = {
    "server identity": (lambda: Order(customer="Ada"), send, "SELECT to_jsonb(id) FROM orders"),
    "key by an SQL expression": (
        lambda: Order(id=literal_column("40 + 2"), customer="Ada"),
        send,
        "SELECT to_jsonb(42)",
    ),
    "client-side uuid": (Parcel, send_parcel, "SELECT to_jsonb(id) FROM parcels"),
    "composite": (lambda: Seat(row="A", number=7), keep_seat, """SELECT '["A", 7]'::jsonb"""),
    "from a foreign key": (
        lambda: Passport(person=Person()),
        stamp,
        "SELECT to_jsonb(person_id) FROM passports",
    ),
    "joined inheritance": (Manager, greet, "SELECT to_jsonb(id) FROM managers"),
    "changed by a listener": (lambda: Code(code="ABC"), redeem, """SELECT '"abc"'::jsonb"""),
}


@pytest.mark.parametrize("sort", ENTITIES)
@pytest.mark.parametrize("added", ["before", "after"])
async def test_a_pending_entity_gets_its_identity_in_the_same_flush(
    session: Any, engine: Engine, sort: str, added: str
) -> None:
    make, task, key = ENTITIES[sort]
    execute(engine, "SELECT setval('people_id_seq', 100), setval('orders_id_seq', 200)")
    entity = make()
    if added == "before":
        session.add(entity)
    enqueue(session, task, entity)
    if added == "after":
        session.add(entity)

    await done(session.commit())

    assert payloads(engine) == [{"it": scalar(engine, key)}]


@pytest.mark.parametrize("sort", ENTITIES)
def test_what_is_stored_finds_the_entity_again(sync: Session, engine: Engine, sort: str) -> None:
    make, task, _ = ENTITIES[sort]
    sync.add(entity := make())
    enqueue(sync, task, entity)
    sync.commit()

    stored = scalar(engine, "SELECT payload::text FROM background_jobs")
    given = task.parameters.decode(stored, lambda cls, identity: sync.get(cls, identity))

    assert given == {"it": entity}
    assert entity is given["it"]


@pytest.mark.parametrize("stored", ['{"it": ["A"]}', '{"it": ["A", 7, 8]}', '{"it": 7}', '{"it": null}'])
def test_a_stored_key_of_another_length_is_refused_before_it_is_looked_up(stored: str) -> None:
    with pytest.raises(PayloadError, match="it must be the primary key of Seat, which has 2 columns"):
        keep_seat.parameters.decode(stored, lambda cls, identity: pytest.fail("looked up"))


async def test_a_persistent_and_an_expired_entity_travel_without_a_query(
    session: Any, engine: Engine, async_engine: AsyncEngine
) -> None:
    session.add_all([persistent := Order(customer="Ada"), expired := Order(customer="Bob")])
    await done(session.flush())
    plain(session).expire(expired)

    with statements(engine) as sent, statements(async_engine) as sent_by_async:
        enqueue(session, send, persistent)
        enqueue(session, send, expired)
        await done(session.flush())
    await done(session.commit())

    assert len(inserts([*sent, *sent_by_async])) == len([*sent, *sent_by_async]) == 1
    ids = scalar(engine, "SELECT array_agg(id ORDER BY customer) FROM orders")
    assert payloads(engine) == [{"it": id_} for id_ in ids]


async def test_an_entity_expired_by_a_commit_travels_from_the_next_transaction(
    session: Any, engine: Engine
) -> None:
    session.add(order := Order(customer="Ada"))
    await done(session.commit())

    enqueue(session, send, order)
    await done(session.commit())

    assert payloads(engine) == [{"it": scalar(engine, "SELECT id FROM orders")}]


async def test_a_detached_entity_travels_too(session: Any, engine: Engine) -> None:
    with Session(engine) as other:
        other.add(order := Order(customer="Ada"))
        other.commit()

    enqueue(session, send, order)
    await done(session.commit())

    assert payloads(engine) == [{"it": scalar(engine, "SELECT id FROM orders")}]


def test_an_entity_deleted_in_the_same_flush_leaves_a_job_that_names_it(
    sync: Session, engine: Engine
) -> None:
    sync.add(order := Order(customer="Ada"))
    sync.commit()
    order_id = order.id

    enqueue(sync, send, order)
    sync.delete(order)
    sync.commit()

    assert payloads(engine) == [{"it": order_id}]


def test_entities_in_a_list_are_resolved_each(sync: Session, engine: Engine) -> None:
    sync.add(persistent := Order(id=7, customer="Ada"))
    sync.flush()
    sync.add(pending := Order(id=8, customer="Bob"))

    enqueue(sync, send_all, [pending, persistent, pending])
    sync.commit()

    assert payloads(engine) == [{"orders": [8, 7, 8]}]


# -- one statement, in the order of the calls


async def test_ids_follow_the_order_of_the_calls_with_and_without_entities(
    session: Any, engine: Engine
) -> None:
    session.add(persistent := Order(id=1000, customer="Ada"))
    await done(session.flush())

    handles = [enqueue(session, count, 1)]
    session.add(pending := Order(id=1001, customer="Bob"))
    handles.append(enqueue(session, send, pending))
    handles.append(enqueue(session, count, 2))
    handles.append(enqueue(session, send, persistent))
    late = Order(id=1002, customer="Cy")
    handles.append(enqueue(session, send, late))
    handles.append(enqueue(session, count, 3))
    session.add(late)
    await done(session.commit())

    calls = [{"value": 1}, {"it": 1001}, {"value": 2}, {"it": 1000}, {"it": 1002}, {"value": 3}]
    assert payloads(engine) == calls
    assert [handle.id for handle in handles] == [row["id"] for row in rows(engine)]


@pytest.mark.parametrize("reference", [False, True], ids=["plain", "pending entity"])
async def test_five_hundred_jobs_of_a_flush_are_one_insert_of_constant_text(
    session: Any, engine: Engine, async_engine: AsyncEngine, reference: bool
) -> None:
    sizes = (1, 3, 500)
    with statements(engine) as sent, statements(async_engine) as sent_by_async:
        for size in sizes:
            if reference:
                session.add(order := Order(customer="Ada"))
                enqueue(session, send, order)
            for value in range(size - reference):
                enqueue(session, count, value)
            await done(session.commit())

    texts = inserts([*sent, *sent_by_async])
    assert len(texts) == len(sizes)
    assert len(set(texts)) == 1
    assert len(rows(engine)) == sum(sizes)


def test_the_cost_of_a_flush_grows_with_its_jobs_and_not_with_their_square(sync: Session) -> None:
    lookups = 0

    class Counted(dict[Any, Any]):
        def values(self) -> Any:
            nonlocal lookups
            lookups += 1
            return super().values()

    sync._new = Counted(sync._new)  # Session.new copies all of it at each use
    for value in range(100):
        enqueue(sync, count, value)
    sync.flush()

    assert lookups < 10


# -- when the flush comes


@pytest.mark.parametrize("how", ["autoflush=False", "no_autoflush"])
def test_without_autoflush_a_job_is_written_at_commit(engine: Engine, how: str) -> None:
    with Session(engine, autoflush=how != "autoflush=False") as session:
        handle = enqueue(session, count, 1)
        with session.no_autoflush:
            before = session.scalars(select(Job.id)).all() if how == "no_autoflush" else []
        if how == "autoflush=False":
            before = session.scalars(select(Job.id)).all()
        session.commit()

    assert before == []
    assert [row["id"] for row in rows(engine)] == [handle.id]


def test_a_query_flushes_and_sees_the_job(sync: Session) -> None:
    handle = enqueue(sync, count, 1)

    found = sync.scalars(select(Job)).one()

    assert (found.id, found.payload) == (handle.id, {"value": 1})


async def test_the_id_is_there_after_the_flush_and_after_the_commit(session: Any, engine: Engine) -> None:
    handle = enqueue(session, count, 1)
    with pytest.raises(NotFlushed, match=r"id of this count job .* call session\.flush\(\), or .* commit"):
        _ = handle.id
    await done(session.flush())
    flushed = handle.id
    await done(session.commit())

    assert flushed == handle.id == rows(engine)[0]["id"]
    assert (handle.kind, handle.queue, handle.created, handle.conflict) == ("count", "default", True, None)


def test_a_handle_shows_whether_it_is_flushed(sync: Session) -> None:
    handle = enqueue(sync, count, 1)
    before = repr(handle)
    sync.flush()

    assert before == "<Enqueued count not flushed>"
    assert repr(handle) == f"<Enqueued count {handle.id}>"


def test_the_private_flag_that_says_a_session_is_flushing_is_still_there(sync: Session) -> None:
    seen = [sync._flushing]

    def look(session: Session, context: object, *_: object) -> None:
        seen.append(session._flushing)

    with listening(sync, "before_flush", look), listening(sync, "after_flush", look):
        sync.add(Order(customer="Ada"))
        sync.flush()
    seen.append(sync._flushing)

    assert seen == [False, True, True, False]


# -- enqueue inside a flush


def once(put: Callable[[Session], None]) -> Callable[..., None]:
    """A listener that acts at its first event."""
    ran: list[bool] = []

    def listener(session: Session, *_: object) -> None:
        if not ran:
            ran.append(True)
            put(session)

    return listener


@pytest.mark.parametrize("first", [False, True], ids=["after ours", "before ours"])
@pytest.mark.parametrize("name", ["before_flush", "after_flush", "after_flush_postexec", "before_commit"])
@pytest.mark.parametrize("argument", ["value", "pending", "added there"])
def test_a_call_in_a_session_listener_is_written_once_and_whole(
    sync: Session, engine: Engine, name: str, argument: str, first: bool
) -> None:
    sync.add(order := Order(customer="pending"))
    handles: list[Enqueued] = []

    def put(session: Session) -> None:
        if argument == "value":
            handles.append(enqueue(session, count, 7))
        elif argument == "pending":
            handles.append(enqueue(session, send, order))
        else:
            session.add(added := Order(customer="added there"))
            handles.append(enqueue(session, send, added))

    with listening(Session if first else sync, name, once(put), insert=first):
        sync.commit()

    key = scalar(engine, f"SELECT id FROM orders WHERE customer = '{argument}'")
    assert payloads(engine) == [{"value": 7} if argument == "value" else {"it": key}]
    assert [handle.id for handle in handles] == [row["id"] for row in rows(engine)]
    assert sync.info == {}


@pytest.mark.parametrize("first", [False, True], ids=["after ours", "before ours"])
@pytest.mark.parametrize("name", ["before_flush", "after_flush"])
@pytest.mark.parametrize("waits", [False, True], ids=["all known", "one waits"])
def test_a_call_in_a_listener_comes_after_the_calls_before_the_flush(
    sync: Session, engine: Engine, name: str, first: bool, waits: bool
) -> None:
    sync.add(order := Order(id=7, customer="Ada"))
    enqueue(sync, count, 1)
    if waits:
        enqueue(sync, send, order)

    def put(session: Session) -> None:
        enqueue(session, count, 2)

    with listening(Session if first else sync, name, once(put), insert=first):
        sync.commit()

    assert payloads(engine) == [{"value": 1}, *([{"it": 7}] if waits else []), {"value": 2}]


@pytest.mark.parametrize("name", ["before_insert", "after_insert"])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside others"])
@pytest.mark.parametrize("argument", ["value", "entity"])
async def test_a_call_in_a_mapper_event_is_written_once_and_whole(
    session: Any, engine: Engine, name: str, alone: bool, argument: str
) -> None:
    def listener(mapper: object, connection: object, target: Order) -> None:
        current = object_session(target)
        assert current is not None
        enqueue(current, send, target) if argument == "entity" else enqueue(current, count, 7)

    session.add(order := Order(customer="Ada"))
    if not alone:
        enqueue(session, send, order)
        enqueue(session, count, 1)
    with listening(Order, name, listener):
        await done(session.commit())

    order_id = scalar(engine, "SELECT id FROM orders")
    others = [] if alone else [{"it": order_id}, {"value": 1}]
    assert payloads(engine) == [*others, {"it": order_id} if argument == "entity" else {"value": 7}]


def test_a_key_that_is_an_sql_expression_is_waited_for_in_a_listener_too(
    sync: Session, engine: Engine
) -> None:
    def listener(mapper: object, connection: object, target: Order) -> None:
        enqueue(sync, send, target)

    with listening(Order, "before_insert", listener):
        sync.add(Order(id=literal_column("40 + 2"), customer="Ada"))
        sync.commit()

    assert payloads(engine) == [{"it": 42}]


def test_a_call_in_an_update_event_is_written_once(sync: Session, engine: Engine) -> None:
    sync.add(order := Order(customer="Ada"))
    sync.commit()

    def listener(mapper: object, connection: object, target: Order) -> None:
        enqueue(sync, send, target)

    with listening(Order, "after_update", listener):
        order.customer = "Bob"
        sync.commit()

    assert payloads(engine) == [{"it": scalar(engine, "SELECT id FROM orders")}]


def test_a_call_in_a_flush_that_fails_leaves_no_job(sync: Session, engine: Engine) -> None:
    execute(engine, "INSERT INTO orders (id, customer) VALUES (1, 'Ada')")

    def listener(mapper: object, connection: object, target: Order) -> None:
        enqueue(sync, count, 7)
        enqueue(sync, send, target)

    with listening(Order, "before_insert", listener):
        sync.add(Order(id=1, customer="Bob"))
        with pytest.raises(IntegrityError):
            sync.commit()
    sync.rollback()
    enqueue(sync, count, 8)
    sync.commit()

    assert payloads(engine) == [{"value": 8}]


def test_a_listener_that_adds_a_job_back_meets_an_error_and_not_an_empty_payload(
    sync: Session, engine: Engine
) -> None:
    stolen: list[object] = []

    def steal(session: Session, context: object, instances: object) -> None:
        stolen.extend(session.new)

    def add_back(session: Session, context: object, instances: object) -> None:
        session.add_all(stolen)

    enqueue(sync, count, 1)
    with (
        listening(Session, "before_flush", steal, insert=True),
        listening(sync, "before_flush", add_back),
        pytest.raises(SqlaJobsError, match=r"written without its arguments.*leave it alone"),
    ):
        sync.commit()
    sync.rollback()

    assert payloads(engine) == []


# -- looked up again


def test_a_job_is_found_by_its_handle_once_it_is_committed(engine: Engine) -> None:
    with Session(engine) as session, Session(engine) as other:
        handle = enqueue(session, count.using(queue="mail", tags=["x"]), 7)
        session.flush()
        before = jobs.find(other, handle.id)
        session.commit()
        found = jobs.find(other, handle.id)

    assert before is None
    assert found is not None
    assert (found.id, found.kind, found.queue, found.payload) == (handle.id, "count", "mail", {"value": 7})
    assert (found.status, found.archived, found.meta) == ("ready", False, {"tags": ["x"]})


async def test_a_job_is_found_from_async_code(async_engine: AsyncEngine) -> None:
    async with AsyncSession(async_engine) as session:
        handle = enqueue(session, count, 7)
        await session.commit()

        found = await session.run_sync(jobs.find, handle.id)
        nobody = await session.run_sync(jobs.find, handle.id + 1)

    assert found is not None
    assert (found.id, nobody) == (handle.id, None)


# -- beside other ways to write a job


def test_added_and_inserted_jobs_of_the_users_own_are_left_alone(sync: Session, engine: Engine) -> None:
    sync.add(Job(kind="count", payload={"value": 1}))
    enqueue(sync, count, 2)
    sync.execute(insert(Job).values(kind="count", payload={"value": 3}))
    sync.execute(insert(Job), [{"kind": "count", "payload": {"value": value}} for value in (4, 5)])
    sync.commit()

    assert sorted(payload["value"] for payload in payloads(engine)) == [1, 2, 3, 4, 5]


def test_an_insert_from_psql_makes_the_same_row(engine: Engine, database_url: str) -> None:
    with Session(engine) as session, session.begin():
        enqueue(session, count, 7)
    psql = find_binaries() / "psql"
    by_hand = """INSERT INTO background_jobs (kind, payload) VALUES ('count', '{"value": 7}')"""
    subprocess.run([psql, "-qXd", database_url, "-c", by_hand], check=True, timeout=30)

    ours, theirs = rows(engine)
    moments = {"id", "run_at", "created_at"}
    assert {k: v for k, v in ours.items() if k not in moments} == {
        k: v for k, v in theirs.items() if k not in moments
    }
    assert ours["run_at"] == ours["created_at"]
    assert theirs["run_at"] == theirs["created_at"]


def test_a_payload_is_what_a_person_would_write(engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        enqueue(session, keep, {"ä": [1, 2.5, True, None, 'it\'s \\ "quoted"']})
        enqueue(session, send, order := Order(id=7, customer="Ada"), note="50% {x} :y %(z)s")
        session.add(order)

    by_hand = [
        r"""{"value": {"ä": [1, 2.5, true, null, "it's \\ \"quoted\""]}}""",
        r"""{"it": 7, "note": "50% {x} :y %(z)s"}""",
    ]
    with engine.connect() as connection:
        numbered = "SELECT payload, row_number() OVER (ORDER BY id) AS n FROM background_jobs"
        statement = (
            f"SELECT payload = CAST(hand AS jsonb) FROM ({numbered}) AS jobs "
            "JOIN unnest(CAST(:hand AS text[])) WITH ORDINALITY AS given (hand, n) USING (n)"
        )
        same = connection.scalars(text(statement), {"hand": by_hand}).all()
    assert same == [True, True]


# -- options


def test_every_option_arrives_in_the_row(sync: Session, engine: Engine) -> None:
    moment = datetime(2031, 5, 17, 12, 30, tzinfo=UTC)
    task = count.using(
        queue="mail",
        priority=-3,
        run_at=moment,
        expires=moment + timedelta(days=1),
        max_attempts=4,
        tags=["a", "ä"],
    )

    enqueue(sync, task, 1)
    enqueue(sync, count, 2)
    sync.commit()

    names = ("queue", "priority", "run_at", "expires_at", "max_attempts", "meta")
    given, default = ({name: row[name] for name in names} for row in rows(engine))
    assert given == {
        "queue": "mail",
        "priority": -3,
        "run_at": moment,
        "expires_at": moment + timedelta(days=1),
        "max_attempts": 4,
        "meta": {"tags": ["a", "ä"]},
    }
    assert default | {"run_at": None} == {
        "queue": "default",
        "priority": 0,
        "run_at": None,
        "expires_at": None,
        "max_attempts": 20,
        "meta": None,
    }


def test_options_of_one_flush_do_not_mix(sync: Session, engine: Engine) -> None:
    moment = datetime(2031, 5, 17, tzinfo=UTC)
    for task in (
        count,
        count.using(run_at=moment),
        count.using(expires=moment),
        count.using(delay=timedelta(days=1)),
        count.using(expires=timedelta(days=1)),
        count.using(priority=1, max_attempts=1, tags=("x",), queue="other"),
    ):
        enqueue(sync, task, 0)
    sync.commit()

    found = rows(engine)
    assert [row["run_at"] - row["created_at"] > timedelta(hours=1) for row in found] == [
        False, True, False, True, False, False,
    ]  # fmt: skip
    assert [row["expires_at"] is not None for row in found] == [False, False, True, False, True, False]
    assert [row["queue"] for row in found] == ["default"] * 5 + ["other"]
    assert [row["max_attempts"] for row in found] == [20] * 5 + [1]


class Queue(StrEnum):
    MAIL = "mail"


class Urgency(IntEnum):
    HIGH = 10


class Moment(datetime):
    """As clock fakes and date libraries have them."""


class Span(timedelta):
    """The same."""


def test_options_of_derived_types_go_beside_plain_ones(sync: Session, engine: Engine) -> None:
    derived = count.using(
        queue=Queue.MAIL,
        priority=Urgency.HIGH,
        run_at=Moment(2031, 1, 1, tzinfo=UTC),
        expires=Span(days=1),
        tags=[Queue.MAIL],
    )
    alike = count.using(
        queue="mail",
        priority=10,
        run_at=datetime(2031, 1, 1, tzinfo=UTC),
        expires=timedelta(days=1),
        tags=["mail"],
    )

    for task in (alike, derived):
        enqueue(sync, task, 1)
    sync.commit()

    one, other = ({k: v for k, v in row.items() if k != "id"} for row in rows(engine))
    assert one == other


def test_a_delay_counts_from_the_insert_and_not_from_the_start_of_the_transaction(
    sync: Session, engine: Engine
) -> None:
    hour, day = timedelta(hours=1), timedelta(days=1)
    begun = sync.scalar(text("SELECT now()"))
    sync.execute(text("SELECT pg_sleep(0.2)"))
    before = sync.scalar(text("SELECT clock_timestamp()"))
    enqueue(sync, count.using(delay=hour, expires=day), 1)
    enqueue(sync, count, 2)
    sync.flush()
    after = sync.scalar(text("SELECT clock_timestamp()"))
    sync.commit()

    assert begun < before - timedelta(seconds=0.1)
    delayed, due = rows(engine)
    assert before <= delayed["run_at"] - hour <= after
    assert before <= delayed["expires_at"] - day <= after
    assert before <= due["run_at"] <= after
    assert before <= due["created_at"] <= after


def test_names_of_queues_are_taken_literally(own_engine: Engine) -> None:
    names = [
        "q" * 63, "q" * 64, "q" * 63 + "a", "q" * 63 + "b", "é" * 32, "select", "user",
        "MyQueue", "myqueue", "a.b", "a:b", "a-b", "a/b", "a b", 'x"; drop table canary; --',
        "x'); select pg_sleep(5); --", "100%", "%s", "%(x)s", "{0}", ":p", "a\\b", "a\nb", "a\tb",
        "😀", "队列", "e\u0301", "\u00e9",
    ]  # fmt: skip
    execute(own_engine, "CREATE TABLE canary ()")

    with Session(own_engine) as session, session.begin():
        for name in names:
            enqueue(session, count.using(queue=name, tags=[name]), 1)

    found = rows(own_engine)
    assert [row["queue"] for row in found] == names
    assert [row["meta"] for row in found] == [{"tags": [name]} for name in names]
    assert scalar(own_engine, "SELECT to_regclass('canary') IS NOT NULL")


# -- refused at the call


def _nested() -> list[Any]:
    inner: list[Any] = []
    inner.append(inner)
    return inner


REFUSED: dict[str, tuple[Task[Any], tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "NaN": (keep, ([1, float("nan")],), {}, PayloadError, r"value\[1\]"),
    "NUL": (keep, ({"a": "x\0y"},), {}, PayloadError, r"value\.a: U\+0000"),
    "lone surrogate": (keep, ("\ud800",), {}, PayloadError, "value: a lone surrogate"),
    "naive datetime": (keep, (datetime(2030, 1, 1),), {}, PayloadError, "value"),
    "colliding keys": (keep, ({1: "a", "1": "b"},), {}, PayloadError, "value"),
    "a set": (keep, ({1},), {}, PayloadError, "value"),
    "contains itself": (keep, (_nested(),), {}, PayloadError, "value"),
    "too large": (keep, ("x" * (256 * 1024),), {}, PayloadError, "value: .*limit is 262,144"),
    "wrong type": (count, ("1",), {}, PayloadError, "value: expected int, got str"),
    "missing": (count, (), {}, ArgumentError, "count misses value"),
    "unknown": (count, (1,), {"valeu": 2}, ArgumentError, "no parameter 'valeu'"),
    "too many": (count, (1, 2), {}, ArgumentError, "takes 1 positional arguments, got 2"),
    "given twice": (count, (1,), {"value": 2}, ArgumentError, "'value' twice"),
    "not an entity": (send, (7,), {}, PayloadError, "it must be Order, got int"),
    "another entity": (send, (Parcel(),), {}, PayloadError, "it must be Order, got Parcel"),
    "an entity without annotation": (keep, (Order(),), {}, PayloadError, "value: .*Order"),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_a_call_that_cannot_travel_is_refused_and_the_rest_commits(
    session: Any, engine: Engine, what: str
) -> None:
    task, args, kwargs, error, message = REFUSED[what]
    session.add(Order(customer="Ada"))
    enqueue(session, count, 1)

    with pytest.raises(error, match=message):
        enqueue(session, task, *args, **kwargs)
    await done(session.commit())

    assert payloads(engine) == [{"value": 1}]
    assert scalar(engine, "SELECT count(*) FROM orders") == 1


def test_a_payload_that_its_keys_make_too_large_is_refused_at_the_flush(
    sync: Session, engine: Engine
) -> None:
    sync.add(order := Order(id=2_000_000_000, customer="Ada"))
    enqueue(sync, send, order, note="x" * (256 * 1024 - 22))

    with pytest.raises(PayloadError, match="limit is 262,144"):
        sync.commit()
    sync.rollback()

    assert payloads(engine) == []


@pytest.mark.parametrize("given", [None, object(), Session, "engine"])
def test_what_is_not_a_session_is_refused(given: Any, engine: Engine) -> None:
    given = engine if given == "engine" else given

    with pytest.raises(ConfigurationError, match=r"enqueue needs a SQLAlchemy session .* got \w+"):
        enqueue(given, count, 1)


def _plain_function(value: int) -> None: ...


@pytest.mark.parametrize("given", [_plain_function, None, "count"])
def test_what_is_not_a_task_is_refused(given: Any, sync: Session) -> None:
    with pytest.raises(ConfigurationError, match=r"is not a task: decorate the function with @jobs\.task"):
        enqueue(sync, given, 1)

    assert list(sync.new) == []


def test_a_session_without_autobegin_says_so_and_keeps_nothing(engine: Engine) -> None:
    with Session(engine, autobegin=False) as session:
        with pytest.raises(InvalidRequestError, match="Autobegin is disabled"):
            enqueue(session, count, 1)

        assert session.info == {}


# -- Job classes in other places


@pytest.mark.parametrize(
    ("task", "table"), [(run, "errands"), (file, '"back office".jobs'), (ready, "sqla_jobs")]
)
async def test_every_job_class_is_written_to_its_own_table(
    session: Any, engine: Engine, task: Task[Any], table: str
) -> None:
    handle = enqueue(session, task, 1)
    await done(session.commit())

    assert [(row["id"], row["payload"]) for row in rows(engine, table)] == [(handle.id, {"value": 1})]
    assert payloads(engine) == []


def test_two_job_classes_in_one_flush_take_one_insert_each(sync: Session, engine: Engine) -> None:
    with statements(engine) as sent:
        handles = [enqueue(sync, task, value) for value in range(3) for task in (count, run)]
        sync.commit()

    assert len(inserts(sent)) == len(inserts(sent, "errands")) == 1
    values = [{"value": value} for value in range(3)]
    assert payloads(engine) == payloads(engine, "errands") == values
    assert [handle.id for handle in handles[::2]] == [row["id"] for row in rows(engine)]
    assert [handle.id for handle in handles[1::2]] == [row["id"] for row in rows(engine, "errands")]


def test_a_column_of_the_users_gets_its_server_default_in_every_row(sync: Session, engine: Engine) -> None:
    for value in range(3):
        enqueue(sync, run, value)
    sync.commit()

    assert len({row["tracking"] for row in rows(engine, "errands")}) == 3


def test_a_job_class_with_listeners_of_its_own_is_written_without_them(sync: Session, engine: Engine) -> None:
    fired: list[object] = []

    with listening(Job, "before_insert", lambda mapper, connection, target: fired.append(target)):
        enqueue(sync, count, 1)
        sync.commit()

    assert fired == []
    assert payloads(engine) == [{"value": 1}]
