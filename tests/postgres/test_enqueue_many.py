"""Many calls at once, jobs out of a select, jobs for programs elsewhere, and columns of the user's own."""

import uuid
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Any

import pytest
from shop import Job, Order
from sqlalchemy import (
    ARRAY,
    DateTime,
    Engine,
    ForeignKey,
    Integer,
    LargeBinary,
    create_engine,
    event,
    func,
    literal,
    make_url,
    select,
    text,
    union_all,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from workers import rows, working

from sqla_jobs.context import JobContext
from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.embedded import EmbeddedPostgres
from sqla_jobs.errors import ArgumentError, ConfigurationError, NotFlushed, PayloadError
from sqla_jobs.models import JobMixin
from sqla_jobs.outbox import Enqueued
from sqla_jobs.tasks import Jobs, enqueue, enqueue_many, enqueue_select

jobs = Jobs(Job)


@jobs.task(name="number", queue="numbers")
def number(value: int) -> None: ...


@jobs.task(name="greet", queue="mail")
def greet(order: Order, copy_to: str | None = None) -> None: ...


def stored(engine: Engine, kind: str = "number") -> list[Any]:
    found = rows(engine, "SELECT payload FROM background_jobs WHERE kind = :kind ORDER BY id", kind=kind)
    return [payload for (payload,) in found]


class Sent:
    """INSERT statements that reach the database."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.statements: list[str] = []

    def __enter__(self) -> list[str]:
        event.listen(self.engine, "before_cursor_execute", self._hear)
        return self.statements

    def __exit__(self, *_: object) -> None:
        event.remove(self.engine, "before_cursor_execute", self._hear)

    def _hear(self, connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("INSERT INTO background_jobs"):
            self.statements.append(statement)


# -- many


def test_many_calls_become_jobs_in_their_order_by_one_statement(clean: Engine) -> None:
    with Sent(clean) as statements, Session(clean) as session, session.begin():
        handles = enqueue_many(session, [number.call(n) for n in range(1000)])
        with pytest.raises(NotFlushed):
            _ = handles[0].id

    ids = [handle.id for handle in handles]
    assert len(statements) == 1
    assert ids == sorted(ids)
    assert stored(clean) == [{"value": n} for n in range(1000)]


def test_calls_of_several_tasks_options_and_models_may_be_mixed(clean: Engine) -> None:
    with Session(clean) as session, session.begin():
        session.add(order := Order(customer="Ada"))
        handles = enqueue_many(
            session,
            [
                number.using(priority=3).call(1),
                greet.call(order),
                number.using(queue="other").call(2),
                greet.call(order, copy_to="b"),
            ],
        )
        session.flush()
        id_ = order.id

    found = rows(clean, "SELECT id, kind, queue, priority, payload FROM background_jobs ORDER BY id")
    assert [row[0] for row in found] == [handle.id for handle in handles]
    assert [row[1:4] for row in found] == [
        ("number", "numbers", 3),
        ("greet", "mail", 0),
        ("number", "other", 0),
        ("greet", "mail", 0),
    ]
    assert [row[4] for row in found][1:] == [
        {"order": id_},
        {"value": 2},
        {"order": id_, "copy_to": "b"},
    ]


def test_many_go_with_their_savepoint_and_with_expunge(clean: Engine) -> None:
    with Session(clean) as session, session.begin():
        savepoint = session.begin_nested()
        enqueue_many(session, [number.call(n) for n in range(5)])
        savepoint.rollback()
        enqueue_many(session, [number.call(n) for n in range(10, 12)])
        session.expunge_all()
        enqueue_many(session, [number.call(20)])

    assert stored(clean) == [{"value": 20}]


def test_many_from_a_flush_listener_are_written_too(clean: Engine) -> None:
    with Session(clean) as session:
        event.listen(
            session, "before_flush", lambda *_: enqueue_many(session, [number.call(1), number.call(2)])
        )
        session.add(Order(customer="Ada"))
        session.commit()

    assert stored(clean) == [{"value": 1}, {"value": 2}]


def test_none_at_all_is_nothing(clean: Engine) -> None:
    with Session(clean) as session, session.begin():
        assert enqueue_many(session, []) == []


@pytest.mark.parametrize(
    ("wrong", "named"),
    [(number, "a PlainTask"), (7, "a int"), ({"value": 1}, "a dict"), (None, "a NoneType")],
)
def test_b44_an_element_that_is_no_call_is_refused_by_its_index(
    clean: Engine, wrong: Any, named: str
) -> None:
    with Session(clean) as session, session.begin():
        session.add(Order(customer="Ada"))
        with pytest.raises(ConfigurationError, match=rf"calls\[2\] is {named}, not a call of a task"):
            enqueue_many(session, [number.call(1), number.call(2), wrong])

    assert rows(clean, "SELECT count(*) FROM orders") == [(1,)]
    assert stored(clean) == []


async def test_many_on_an_async_session(async_engine: AsyncEngine, engine: Engine) -> None:
    async with AsyncSession(async_engine) as session, session.begin():
        handles = enqueue_many(session, [number.call(n) for n in range(10)])

    assert [handle.created for handle in handles] == [True] * 10
    assert stored(engine) == [{"value": n} for n in range(10)]


def test_more_than_a_chunk_are_written_in_order(clean: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sqla_jobs.outbox.rows._CHUNK", 7)

    with Session(clean) as session, session.begin():
        handles = enqueue_many(session, [number.call(n) for n in range(23)])
        keyed = enqueue_many(session, [number.using(unique_key=f"{n:02}").call(n) for n in range(23)])

    assert [handle.id for handle in handles] == sorted(handle.id for handle in handles)
    assert [handle.id for handle in keyed] == sorted(handle.id for handle in keyed)
    assert stored(clean) == [{"value": n} for n in range(23)] * 2


# -- a select


def test_every_row_of_a_select_becomes_a_job(clean: Engine) -> None:
    with Session(clean) as session, session.begin():
        session.add_all([Order(customer=name) for name in ("Ada", "Bob", "Cy")])
        session.flush()
        chosen = select(Order.id.label("order"), Order.customer.label("copy_to")).where(
            Order.customer != "Bob"
        )
        handle = enqueue_select(session, greet.using(priority=4, tags=["all"]), chosen)
        with pytest.raises(NotFlushed):
            _ = handle.count

    assert handle.count == 2
    assert stored(clean, "greet") == [{"order": 1, "copy_to": "Ada"}, {"order": 3, "copy_to": "Cy"}]
    assert rows(clean, "SELECT DISTINCT queue, priority, max_attempts, meta FROM background_jobs") == [
        ("mail", 4, 20, {"tags": ["all"]})
    ]


def test_a_select_sees_what_its_own_flush_writes_and_jobs_of_the_flush_come_before(clean: Engine) -> None:
    with Session(clean) as session, session.begin():
        session.add(order := Order(customer="Ada"))
        handle = enqueue_select(session, greet, select(Order.id.label("order")))
        enqueue(session, greet, order, copy_to="first")

    assert handle.count == 1
    assert stored(clean, "greet") == [{"order": 1, "copy_to": "first"}, {"order": 1}]


def test_a_select_alone_sees_what_its_own_flush_writes(clean: Engine) -> None:
    with Session(clean) as session, session.begin():
        session.add(Order(customer="Ada"))
        handle = enqueue_select(session, greet, select(Order.id.label("order")))

    assert handle.count == 1


def test_a_select_in_a_session_without_other_work_runs_at_its_flush(clean: Engine) -> None:
    with Session(clean) as session, session.begin():
        session.add(Order(customer="Ada"))
    with Session(clean) as session:
        order = session.get_one(Order, 1)
        order.customer = order.customer  # touched, and not changed
        handle = enqueue_select(session, greet, select(Order.id.label("order")))
        session.flush()
        counted = handle.count
        session.commit()

    assert counted == 1
    assert len(stored(clean, "greet")) == 1


def test_a_select_goes_with_its_savepoint_and_its_transaction(clean: Engine) -> None:
    chosen = select(literal(1).label("value"))
    with Session(clean) as session:
        savepoint = session.begin_nested()
        enqueue_select(session, number, chosen)
        savepoint.rollback()
        enqueue_select(session, number, chosen)
        session.rollback()
        enqueue_select(session, number, union_all(chosen, chosen))
        session.commit()

    assert len(stored(clean)) == 2


async def test_a_select_on_an_async_session(async_engine: AsyncEngine, engine: Engine) -> None:
    async with AsyncSession(async_engine) as session, session.begin():
        handle = enqueue_select(
            session, number, select(func.generate_series(1, 50, type_=Integer).label("value"))
        )

    assert handle.count == 50


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (select(literal(1).label("other")), "has no parameter 'other'"),
        (select(literal(1).label("value"), literal(2).label("more")), "has no parameter 'more'"),
        (select(literal("a").label("value")), r"column 'value' of the select is String\(\)"),
        (select(literal(Decimal("1.5")).label("value")), "column 'value' of the select is Numeric"),
        (select(literal(date(2026, 1, 1)).label("value")), "column 'value' of the select is Date"),
    ],
)
def test_a_select_that_does_not_fit_is_refused_at_the_call(
    clean: Engine, statement: Any, message: str
) -> None:
    with Session(clean) as session, session.begin():
        session.add(Order(customer="Ada"))
        with pytest.raises(ArgumentError, match=message):
            enqueue_select(session, number, statement)

    assert rows(clean, "SELECT count(*) FROM orders") == [(1,)]


def test_a_select_without_a_required_column_is_refused() -> None:
    with Session() as session, pytest.raises(ArgumentError, match="misses order"):
        enqueue_select(session, greet, select(literal("x").label("copy_to")))


def test_what_is_no_select_or_has_a_unique_key_is_refused() -> None:
    with Session() as session:
        with pytest.raises(ConfigurationError, match=r"takes a select\(\), got TextClause"):
            enqueue_select(session, number, text("SELECT 1 AS value"))  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="which many rows cannot share"):
            enqueue_select(session, number.using(unique_key="k"), select(literal(1).label("value")))


# -- a second application, with columns of every type and columns of its own


class Base(DeclarativeBase):
    type_annotation_map = {dict[str, Any]: JSONB, list[int]: ARRAY(Integer)}  # noqa: RUF012


class Level(StrEnum):
    LOW = "low"


class Thing(Base):
    __tablename__ = "things"

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    flag: Mapped[bool]
    whole: Mapped[int]
    real: Mapped[float]
    exact: Mapped[Decimal]
    words: Mapped[str]
    level: Mapped[str]
    day: Mapped[date]
    hour: Mapped[time]
    moment: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    span: Mapped[timedelta]
    binary: Mapped[bytes] = mapped_column(LargeBinary)
    tree: Mapped[dict[str, Any]]
    many: Mapped[list[int]]
    nothing: Mapped[str | None]


class TenantJob(JobMixin, Base):
    __tablename__ = "tenant_jobs"

    tenant: Mapped[str | None]
    shard: Mapped[int] = mapped_column(default=7, server_default="0")
    due_on: Mapped[date | None]
    thing_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("things.id"))


tenants = Jobs(TenantJob)


@tenants.task(name="everything")
def everything(
    thing: Thing,
    flag: bool,
    whole: int,
    real: float,
    exact: Decimal,
    words: str,
    level: Level,
    day: date,
    hour: time,
    moment: datetime,
    span: timedelta,
    binary: bytes,
    tree: dict[str, Any],
    many: list[int],
    nothing: str | None,
) -> None:
    received.append(
        {name: value for name, value in locals().items() if name != "thing"} | {"thing": thing.id}
    )


received: list[dict[str, Any]] = []

VALUES: dict[str, Any] = {
    "flag": True,
    "whole": 2**20,
    "real": 0.1,
    "exact": Decimal("1.10"),
    "words": 'quote " and é',
    "level": Level.LOW,
    "day": date(2026, 2, 28),
    "hour": time(23, 59, 58),
    "moment": datetime(2026, 3, 29, 1, 30, 0, 250000, tzinfo=UTC),
    "span": timedelta(days=-3, seconds=5, microseconds=7),
    "binary": bytes(range(256)),
    "tree": {"a": [1, {"b": None}]},
    "many": [1, 2, 3],
    "nothing": None,
}
ID = uuid.UUID(int=77)


@pytest.fixture(scope="module")
def tenants_url(server: EmbeddedPostgres) -> Iterator[str]:
    url = server.create_database("tenants")
    engine = create_engine(make_url(url).set(drivername="postgresql+psycopg"))
    Base.metadata.create_all(engine)
    engine.dispose()
    yield url
    server.drop_database("tenants")


@pytest.fixture
def tenants_engine(tenants_url: str) -> Iterator[Engine]:
    engine = create_engine(make_url(tenants_url).set(drivername="postgresql+psycopg"))
    yield engine
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE tenant_jobs, tenant_jobs_archive, things"))
    engine.dispose()
    received.clear()


def add_thing(engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        session.add(Thing(id=ID, **VALUES))


async def test_every_type_of_column_reaches_the_handler_as_its_annotation_says(
    tenants_engine: Engine, tenants_url: str
) -> None:
    add_thing(tenants_engine)
    columns = [getattr(Thing, name).label(name) for name in VALUES]

    with Session(tenants_engine) as session, session.begin():
        session.execute(text("SET LOCAL TimeZone = 'Asia/Kolkata'"))
        handle = enqueue_select(session, everything, select(Thing.id.label("thing"), *columns))
    async with working(tenants, tenants_url) as (_, heard):
        assert await heard.settled(1) == [JobStatus.DONE]

    assert handle.count == 1
    assert received == [VALUES | {"thing": ID}]
    assert type(received[0]["exact"]) is Decimal
    assert str(received[0]["exact"]) == "1.10"


async def test_a_remote_call_reaches_the_handler_as_its_annotation_says(
    tenants_engine: Engine, tenants_url: str
) -> None:
    elsewhere = Jobs(TenantJob).remote("everything")
    add_thing(tenants_engine)

    with Session(tenants_engine) as session, session.begin():
        thing = session.get_one(Thing, ID)
        enqueue(session, elsewhere, thing=thing, **VALUES)
    async with working(tenants, tenants_url) as (_, heard):
        assert await heard.settled(1) == [JobStatus.DONE]

    assert received == [VALUES | {"thing": ID}]


# -- remote


def test_a_remote_task_takes_options_and_goes_through_every_way_to_enqueue(clean: Engine) -> None:
    remote = Jobs(Job).remote("number", queue="numbers", priority=2, max_attempts=3)

    with Session(clean) as session, session.begin():
        enqueue(session, remote, value=1)
        enqueue_many(session, [remote.using(queue="other").call(value=2)])
        enqueue_select(session, remote, select(literal(3).label("value")))

    found = rows(clean, "SELECT queue, priority, max_attempts, payload FROM background_jobs ORDER BY id")
    assert found == [
        ("numbers", 2, 3, {"value": 1}),
        ("other", 2, 3, {"value": 2}),
        ("numbers", 2, 3, {"value": 3}),
    ]


def test_a_remote_task_has_what_a_worker_would_not_run() -> None:
    own = Jobs(Job)
    remote = own.remote("app.elsewhere.send")

    assert dict(own.tasks) == {}
    with pytest.raises(TypeError, match="it can be enqueued, not called"):
        remote()
    with pytest.raises(ArgumentError, match="by keyword, got 1 without"):
        remote.call(7)
    with pytest.raises(PayloadError, match=r"a.b\[1\]"):
        remote.call(a={"b": [1, object()]})
    with pytest.raises(ConfigurationError, match="kind must have 1 to 200 bytes"):
        own.remote("")


# -- columns of the user's


async def test_columns_of_the_users_are_filled_and_reach_the_archive(
    tenants_engine: Engine, tenants_url: str
) -> None:
    own = Jobs(TenantJob)

    @own.task(name="plain")
    def plain(ctx: JobContext) -> None: ...

    add_thing(tenants_engine)
    day = date(2026, 5, 1)

    with Session(tenants_engine) as session, session.begin():
        one = enqueue(session, plain.using(columns={"tenant": "acme", "due_on": day, "thing_id": ID}))
        two = enqueue(session, plain)
        three = enqueue_many(
            session, [plain.using(columns={"tenant": name, "shard": 1}).call() for name in ("x", "y")]
        )
        keyed = enqueue(session, plain.using(columns={"tenant": "k"}, unique_key="k"))
        again = enqueue(session, plain.using(columns={"tenant": "l"}, unique_key="k"))
    live = rows(tenants_engine, "SELECT id, tenant, shard, due_on, thing_id FROM tenant_jobs ORDER BY id")
    async with working(own, tenants_url) as (_, heard):
        await heard.settled(5)

    expected = [
        (one.id, "acme", 7, day, ID),  # 7: the default in Python
        (two.id, None, 7, None, None),
        (three[0].id, "x", 1, None, None),
        (three[1].id, "y", 1, None, None),
        (keyed.id, "k", 7, None, None),
    ]
    assert sorted(live) == sorted(expected)
    assert not again.created
    archived = rows(tenants_engine, "SELECT id, tenant, shard, due_on, thing_id FROM tenant_jobs_archive")
    assert sorted(archived) == sorted(expected)


def test_a_select_fills_columns_of_the_users_as_other_calls_do(tenants_engine: Engine) -> None:
    own = Jobs(TenantJob)

    @own.task(name="plain")
    def plain(value: int) -> None: ...

    with Session(tenants_engine) as session, session.begin():
        enqueue_select(session, plain.using(columns={"tenant": "acme"}), select(literal(1).label("value")))

    assert rows(tenants_engine, "SELECT tenant, shard FROM tenant_jobs") == [("acme", 7)]


def test_a_select_cannot_call_a_default_of_python() -> None:
    class Other(DeclarativeBase):
        pass

    class Tracked(JobMixin, Other):
        __tablename__ = "tracked"
        token: Mapped[uuid.UUID] = mapped_column(default=uuid.uuid4, server_default=func.gen_random_uuid())

    own = Jobs(Tracked)

    @own.task(name="plain")
    def plain(value: int) -> None: ...

    with Session() as session, pytest.raises(ConfigurationError, match="'token' of tracked has a default in"):
        enqueue_select(session, plain, select(literal(1).label("value")))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"tenat": "x"}, "no column 'tenat' of your own; the columns of your own are due_on, shard, tenant"),
        ({"priority": 3}, "'priority' is a column of ours: use its own option"),
    ],
)
def test_a_column_that_is_not_there_is_refused_at_the_call(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        everything.using(columns=columns)


def test_a_job_class_without_columns_of_the_users_says_so() -> None:
    with pytest.raises(ConfigurationError, match="Job has no column 'tenant' of your own; it has none"):
        number.using(columns={"tenant": "x"})


# -- asyncpg


async def test_the_outbox_works_on_asyncpg(engine: Engine) -> None:
    driver = create_async_engine(engine.url.set(drivername="postgresql+asyncpg"))
    later = datetime(2030, 1, 1, tzinfo=UTC)
    async with AsyncSession(driver) as session, session.begin():
        session.add(order := Order(customer="Ada"))
        handles: list[Enqueued] = [
            enqueue(session, greet, order),
            enqueue(session, number.using(delay=timedelta(minutes=5), tags=["a"], expires=later), 1),
            *enqueue_many(session, [number.using(run_at=later).call(n) for n in (2, 3)]),
            enqueue(session, number.using(unique_key="k"), 4),
            enqueue(session, number.using(unique_key="k"), 5),
        ]
        selected = enqueue_select(
            session, number, select(func.generate_series(6, 7, type_=Integer).label("value"))
        )
    async with AsyncSession(driver) as session, session.begin():
        again = enqueue(session, number.using(unique_key="k"), 8)
    await driver.dispose()

    assert [handle.created for handle in handles] == [True] * 5 + [False]
    assert (again.id, again.conflict) == (handles[4].id, "waiting")
    assert selected.count == 2
    assert [payload["value"] for payload in stored(engine)] == [1, 2, 3, 4, 6, 7]
