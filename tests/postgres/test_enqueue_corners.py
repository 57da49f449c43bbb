"""Odd places and odd arguments of enqueue: nothing is lost in silence, and what cannot work is refused."""

import enum
import uuid
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from shop import Job, Order
from sqlalchemy import Connection, Engine, ForeignKey, create_engine, event, func, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column, sessionmaker
from workers import execute, rows, working

from sqla_jobs.context import AsyncJobContext, JobContext
from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.core.retry import Retry
from sqla_jobs.errors import ConfigurationError, PayloadError
from sqla_jobs.models import JobMixin, tables_of
from sqla_jobs.tasks import Jobs, enqueue, enqueue_select
from sqla_jobs.worker.single import run_next

PAYLOADS = "SELECT payload FROM background_jobs ORDER BY id"


@pytest.fixture
def jobs() -> Jobs:
    """Tasks of this test's own, on the shop's tables."""
    return Jobs(Job)


@pytest.fixture
def own(empty_database_url: str) -> Iterator[Engine]:
    """An engine on a database without tables."""
    engine = create_engine(sa.make_url(empty_database_url).set(drivername="postgresql+psycopg"))
    yield engine
    engine.dispose()


# -- a session that a handler closes

WRITES: dict[str, Any] = {
    "core update": lambda s: s.execute(sa.update(Order).values(customer="Bob")),
    "core insert": lambda s: s.execute(sa.insert(Order).values(customer="Bob")),
    "text": lambda s: s.execute(text("with x as (select 1) insert into orders (customer) values ('Bob')")),
    "bulk": lambda s: s.bulk_save_objects([Order(customer="Bob")]),
    "bulk by execute": lambda s: s.execute(sa.insert(Order), [{"customer": "Bob"}]),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
@pytest.mark.parametrize("ends", ["close", "reset"])
async def test_what_a_handler_wrote_by_any_way_is_not_closed_away_in_silence(
    engine: Engine, database_url: str, jobs: Jobs, write: Any, ends: str
) -> None:
    execute(engine, "INSERT INTO orders (customer) VALUES ('Ada')")

    @jobs.task(name="job", retry=Retry(max_attempts=1))
    def job(ctx: JobContext) -> None:
        write(ctx.session)
        getattr(ctx.session, ends)()

    with Session(engine) as session, session.begin():
        enqueue(session, job)
    async with working(jobs, database_url) as (_, heard):
        assert await heard.settled(1) == [JobStatus.FAILED]

    [(error,)] = rows(engine, "SELECT last_error FROM background_jobs")
    assert "ctx.session was closed before its handler ended" in error


async def test_a_job_that_a_handler_enqueued_is_not_closed_away_in_silence(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    @jobs.task(name="child", queue="other")
    def child() -> None: ...

    @jobs.task(name="job", retry=Retry(max_attempts=1))
    async def job(ctx: AsyncJobContext) -> None:
        enqueue(ctx.session, child)
        await ctx.session.flush()
        await ctx.session.close()

    with Session(engine) as session, session.begin():
        enqueue(session, job)
    async with working(jobs, database_url, queues=["default"]) as (_, heard):
        assert await heard.settled(1) == [JobStatus.FAILED]


READS: dict[str, Any] = {
    "select": lambda s: s.scalars(select(Order)).all(),
    "for update": lambda s: s.scalars(select(Order).with_for_update()).all(),
    "no key": lambda s: s.scalars(select(Order).with_for_update(key_share=True)).all(),
    "text": lambda s: s.execute(text("SELECT 'insert' AS updated_at")),
    "committed": lambda s: (s.execute(sa.insert(Order).values(customer="Bob")), s.commit()),
}


@pytest.mark.parametrize("read", [READS[name] for name in READS if name != "text"])
async def test_a_session_that_only_read_or_committed_may_be_closed(
    engine: Engine, database_url: str, jobs: Jobs, read: Any
) -> None:
    @jobs.task(name="job", retry=Retry(max_attempts=1))
    def job(ctx: JobContext) -> None:
        with ctx.session as session:
            read(session)

    with Session(engine) as session, session.begin():
        enqueue(session, job)
    async with working(jobs, database_url) as (_, heard):
        assert await heard.settled(1) == [JobStatus.DONE]


async def test_attributes_can_be_read_after_a_commit_in_a_coroutine(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    seen: list[str] = []

    @jobs.task(name="job", retry=Retry(max_attempts=1))
    async def job(ctx: AsyncJobContext) -> None:
        order = Order(customer="Ada")
        ctx.session.add(order)
        await ctx.session.commit()
        seen.append(order.customer)

    with Session(engine) as session, session.begin():
        enqueue(session, job)
    async with working(jobs, database_url) as (_, heard):
        assert await heard.settled(1) == [JobStatus.DONE]

    assert seen == ["Ada"]


# -- selects in flush listeners


@pytest.mark.parametrize(
    ("moment", "work"),
    [
        *[("before_flush", work) for work in ("an entity", "an enqueue", "both")],
        # a flush of enqueues alone has no second event
        *[("after_flush", work) for work in ("an entity", "both")],
        *[("after_flush_postexec", work) for work in ("an entity", "both")],
    ],
)
def test_a_select_that_a_flush_listener_enqueues_is_written(
    engine: Engine, jobs: Jobs, moment: str, work: str
) -> None:
    @jobs.task(name="one")
    def one(order: int) -> None: ...

    @jobs.task(name="other")
    def other() -> None: ...

    execute(engine, "INSERT INTO orders (id, customer) VALUES (700, 'Ada')")
    handles: list[Any] = []

    class Listened(Session):
        pass

    def listen(session: Session, *_: object) -> None:
        if not handles:
            handles.append(enqueue_select(session, one, select(Order.id.label("order"))))

    event.listen(Listened, moment, listen)
    with sessionmaker(engine, class_=Listened)() as session, session.begin():
        if work != "an enqueue":
            session.add(Order(id=701, customer="Bob"))
        if work != "an entity":
            enqueue(session, other)

    wanted = 1 if work == "an enqueue" else 2
    assert handles[0].count == wanted
    found = [payload["order"] for (payload,) in rows(engine, PAYLOADS) if payload]
    assert sorted(found) == [700, 701][:wanted]


def test_entities_that_cannot_be_hashed_do_not_matter_to_a_select(own: Engine) -> None:
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class DataJob(JobMixin, Base, init=False):
        __tablename__ = "data_jobs"

    class Item(Base):
        __tablename__ = "items"
        id: Mapped[int] = mapped_column(primary_key=True)

    data_jobs = Jobs(DataJob)

    @data_jobs.task(name="one")
    def one(item: int) -> None: ...

    Base.metadata.create_all(own)
    with Session(own) as session, session.begin():
        session.add(Item(id=5))
        handle = enqueue_select(session, one, select(Item.id.label("item")))

    assert handle.count == 1


class Swapped(enum.Enum):
    """The values are the names of other members."""

    RED = "BLUE"
    BLUE = "RED"


class Numbered(enum.Enum):
    ONE = 1
    TWO = 2


@pytest.mark.parametrize("members", [Swapped, Numbered])
def test_a_select_of_an_enum_gives_the_handler_its_own_member(own: Engine, members: Any) -> None:
    class Base(DeclarativeBase):
        pass

    class EnumJob(JobMixin, Base):
        __tablename__ = "enum_jobs"
        made_at: Mapped[datetime | None] = mapped_column(sa.DateTime(timezone=True), default=func.now())

    class Item(Base):
        __tablename__ = "items"
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[Any] = mapped_column(sa.Enum(members))

    enum_jobs, got = Jobs(EnumJob), []

    def takes(kind: Any) -> None:
        got.append(kind)

    takes.__annotations__["kind"] = members
    task: Any = enum_jobs.task(name="takes")(takes)
    Base.metadata.create_all(own)
    every = list(members)
    with Session(own) as session, session.begin():
        session.add_all([Item(id=number, kind=each) for number, each in enumerate(every)])
        session.flush()
        handle = enqueue_select(session, task, select(Item.kind.label("kind")).order_by(Item.id))
    with own.begin() as connection:
        while run_next(connection, enum_jobs):
            pass

    assert handle.count == 2
    assert sorted(got, key=every.index) == every
    assert rows(own, "SELECT count(*) FROM enum_jobs_archive WHERE made_at IS NOT NULL") == [(2,)]


# -- unique keys made of arguments


def test_a_key_made_of_an_entity_waits_for_its_identity(engine: Engine, jobs: Jobs) -> None:
    @jobs.task(name="remind", unique_key=lambda order, day="mon": f"{order.id} {day}")
    def remind(order: Order, day: str = "mon") -> None: ...

    with Session(engine) as session, session.begin():
        orders = [Order(id=None, customer=name) for name in ("Ada", "Bob")]
        session.add_all(orders)
        handles = [enqueue(session, remind, order) for order in (*orders, orders[0])]

    assert [handle.created for handle in handles] == [True, True, False]
    keys = rows(engine, "SELECT unique_key FROM background_jobs ORDER BY id")
    assert keys == [(f"{order_id} mon",) for order_id in (1, 2)]


def test_a_key_function_sees_the_defaults_of_the_handler(engine: Engine, jobs: Jobs) -> None:
    @jobs.task(name="remind", unique_key=lambda user, day: f"{user} {day}")
    def remind(user: int, day: str = "mon") -> None: ...

    with Session(engine) as session, session.begin():
        enqueue(session, remind, 7)

    assert rows(engine, "SELECT unique_key FROM background_jobs") == [("7 mon",)]


def test_a_key_function_that_fails_is_refused_at_the_call(engine: Engine, jobs: Jobs) -> None:
    @jobs.task(name="remind", unique_key=lambda user: user.nobody)
    def remind(user: int) -> None: ...

    with Session(engine) as session, session.begin():
        with pytest.raises(ConfigurationError, match=r"unique_key of task remind could not be made.*nobody"):
            enqueue(session, remind, 7)
        session.add(Order(customer="Ada"))

    assert rows(engine, "SELECT count(*) FROM orders") == [(1,)]


# -- keys of entities


class Guid(sa.types.TypeDecorator[uuid.UUID]):
    """SQLAlchemy's recipe."""

    impl = sa.CHAR(32)
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: object) -> Any:
        return None if value is None else uuid.UUID(str(value)).hex

    def process_result_value(self, value: Any, dialect: object) -> Any:
        return None if value is None else uuid.UUID(value)


class Number(int):
    """What a type of the user's returns."""


class Counted(sa.types.TypeDecorator[int]):
    impl = sa.Integer
    cache_ok = True

    def process_result_value(self, value: Any, dialect: object) -> Any:
        return None if value is None else Number(value)


class KeyBase(DeclarativeBase):
    pass


class KeyJob(JobMixin, KeyBase):
    __tablename__ = "key_jobs"


class ByGuid(KeyBase):
    __tablename__ = "by_guid"
    id: Mapped[uuid.UUID] = mapped_column(Guid(), primary_key=True)


class ByMoment(KeyBase):
    __tablename__ = "by_moment"
    at: Mapped[datetime] = mapped_column(sa.DateTime(), primary_key=True)


class ByCounted(KeyBase):
    __tablename__ = "by_counted"
    id: Mapped[int] = mapped_column(Counted(), primary_key=True)


class ByUnknown(KeyBase):
    __tablename__ = "by_unknown"
    id = mapped_column(Guid(), primary_key=True)


SOME = uuid.UUID("5a5a5a5a-5a5a-4a5a-8a5a-5a5a5a5a5a5a")


@pytest.mark.parametrize(
    ("entity", "key"),
    [(ByGuid, SOME), (ByMoment, datetime(2026, 1, 2, 3, 4, 5)), (ByCounted, 7)],
    ids=["guid", "naive datetime", "decorated int"],
)
@pytest.mark.parametrize("pending", [True, False])
def test_an_entity_with_such_a_key_travels(own: Engine, entity: Any, key: Any, pending: bool) -> None:
    KeyBase.metadata.create_all(own)
    key_jobs, got = Jobs(KeyJob), []

    def takes(it: Any) -> None:
        got.append(sa.inspect(it).identity)

    takes.__annotations__["it"] = entity
    task: Any = key_jobs.task(name="takes")(takes)
    attribute = "at" if entity is ByMoment else "id"
    with Session(own) as session, session.begin():
        session.add(it := entity(**{attribute: key}))
        if not pending:
            session.flush()
            session.expire(it)
            session.refresh(it)
        enqueue(session, task, it)
    with own.begin() as connection:
        found = run_next(connection, key_jobs)

    assert found is not None
    assert found[1].status is JobStatus.DONE
    assert got == [(key,)]


def test_a_key_whose_type_nobody_knows_is_refused_at_the_call(own: Engine) -> None:
    KeyBase.metadata.create_all(own)
    key_jobs = Jobs(KeyJob)

    @key_jobs.task(name="takes")
    def takes(it: ByUnknown) -> None: ...

    with Session(own) as session, session.begin():
        session.add(it := ByUnknown(id=SOME))
        session.flush()
        with pytest.raises(PayloadError, match=r"ByUnknown.id is a key of type .*annotate it"):
            enqueue(session, takes, it)

    with Session(own) as session:
        assert session.scalar(select(func.count()).select_from(ByUnknown)) == 1


# -- columns of the user's


def test_a_foreign_key_to_a_class_that_comes_later_gives_its_type_to_the_archive(own: Engine) -> None:
    class Base(DeclarativeBase):
        pass

    class LateJob(JobMixin, Base):
        __tablename__ = "late_jobs"
        order_id: Mapped[int | None] = mapped_column(ForeignKey("late_orders.id"))

    class LateOrder(Base):
        __tablename__ = "late_orders"
        id: Mapped[int] = mapped_column(sa.BigInteger, primary_key=True)

    Base.metadata.create_all(own)

    assert isinstance(tables_of(LateJob).archive.c.order_id.type, sa.BigInteger)
    found = rows(
        own,
        "SELECT data_type FROM information_schema.columns WHERE column_name = 'order_id' ORDER BY table_name",
    )
    assert found == [("bigint",), ("bigint",)]


class WideBase(DeclarativeBase):
    pass


class WideJob(JobMixin, WideBase):
    __tablename__ = "wide_jobs"
    tenant: Mapped[str | None]
    shard: Mapped[int] = mapped_column(server_default=text("0"))


class Tenant(WideBase):
    __tablename__ = "tenants"
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"tenant": "a\0b"}, "'tenant' of WideJob holds U\\+0000"),
        ({"tenant": func.now()}, "'tenant' of WideJob takes a value, not an expression"),
        ({"tenant": Tenant.id}, "'tenant' of WideJob takes a value, not an expression"),
        ({"tenant": Tenant(id=1)}, "'tenant' of WideJob takes a value, not an entity"),
        ({"shard": None}, "'shard' of WideJob must not be null"),
    ],
    ids=["nul", "function", "column", "entity", "null"],
)
def test_a_value_of_a_column_that_its_flush_would_refuse_is_refused_at_the_call(
    columns: dict[str, object], words: str
) -> None:
    wide_jobs = Jobs(WideJob)

    @wide_jobs.task(name="job")
    def job() -> None: ...

    with pytest.raises(ConfigurationError, match=words):
        job.using(columns=columns)


def test_jobs_with_different_columns_are_written_in_the_order_of_their_calls(own: Engine) -> None:
    WideBase.metadata.create_all(own)
    wide_jobs = Jobs(WideJob)

    @wide_jobs.task(name="job")
    def job(number: int) -> None: ...

    with Session(own) as session, session.begin():
        for number in range(4):
            columns: dict[str, object] = {"tenant": "a"} if number % 2 else {"shard": 1}
            enqueue(session, job.using(columns=columns), number)

    found = rows(own, "SELECT payload ->> 'number' FROM wide_jobs ORDER BY id")
    assert found == [("0",), ("1",), ("2",), ("3",)]


@pytest.mark.parametrize("decides", ["kind", func.lower("x")], ids=["ours", "an expression"])
def test_a_discriminator_that_is_no_column_of_the_users_is_refused(decides: Any) -> None:
    class Base(DeclarativeBase):
        pass

    with pytest.raises(ConfigurationError, match=r"polymorphic_on of .* must be a column of your own"):
        type(
            "Odd",
            (JobMixin, Base),
            {
                "__tablename__": "odd_jobs",
                "__mapper_args__": {
                    **JobMixin.__mapper_args__,
                    "polymorphic_on": decides,
                    "polymorphic_identity": "odd",
                },
            },
        )


# -- what else a user may hand in


@pytest.mark.parametrize("id_", ["abc", True, 1.5, None])
def test_what_is_no_id_is_refused_and_the_transaction_goes_on(engine: Engine, jobs: Jobs, id_: Any) -> None:
    with Session(engine) as session:
        with pytest.raises(ConfigurationError, match="takes the id of a job, an int, got"):
            jobs.find(session, id_)
        assert jobs.find(session, 2**70) is None
        assert jobs.find(session, 1) is None


def test_a_job_that_expires_before_it_is_due_is_refused(jobs: Jobs) -> None:
    @jobs.task(name="job")
    def job() -> None: ...

    with pytest.raises(ConfigurationError, match="comes before the job is due"):
        job.using(delay=timedelta(hours=2), expires=timedelta(hours=1))
    job.using(delay=timedelta(hours=1), expires=timedelta(hours=2))


@pytest.mark.parametrize("what", ["session", "engine", "autocommit"])
def test_run_next_refuses_what_is_no_transaction(engine: Engine, jobs: Jobs, what: str) -> None:
    @jobs.task(name="job")
    def job() -> None: ...

    with Session(engine) as session, engine.connect() as plain:
        autocommit = plain.execution_options(isolation_level="AUTOCOMMIT")
        given: Any = {"session": session, "engine": engine, "autocommit": autocommit}[what]
        with pytest.raises(ConfigurationError, match="run_next"):
            run_next(given, jobs)


def test_run_next_leaves_the_settings_of_the_transaction_as_they_were(engine: Engine, jobs: Jobs) -> None:
    @jobs.task(name="job")
    def job(ctx: JobContext) -> None:
        ctx.session.add(Order(customer="Ada"))

    with engine.begin() as connection:
        connection.execute(text("SET LOCAL lock_timeout = '7s'"))
        with Session(connection) as session:
            enqueue(session, job)
            session.commit()
        assert run_next(connection, jobs) is not None
        assert lock_timeout(connection) == "7s"
        assert connection.scalar(text("SELECT count(*) FROM orders")) == 1


def test_run_next_leaves_deferred_constraints_of_the_transaction_deferred(engine: Engine, jobs: Jobs) -> None:
    @jobs.task(name="job")
    def job(ctx: JobContext) -> None:
        ctx.session.add(Order(customer="Ada"))

    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE once (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)"))
        with Session(connection) as session:
            enqueue(session, job)
            session.commit()
        assert run_next(connection, jobs) is not None
        connection.execute(text("INSERT INTO once VALUES (1), (1)"))  # mended before the commit
        connection.execute(text("DELETE FROM once"))


def lock_timeout(connection: Connection) -> object:
    return connection.scalar(text("SHOW lock_timeout"))


def test_all_forms_of_a_task_share_what_is_compiled(jobs: Jobs) -> None:
    @jobs.task(name="job")
    def job(order: Order) -> None: ...

    one, two = job.using(priority=1), job.using(priority=2)

    assert one.parameters is two.parameters is job.parameters
    assert one.takes_entities
    assert job.takes_entities
