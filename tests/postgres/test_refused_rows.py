"""One row that the database refuses to let go costs itself alone: at a settle, a rescue and an expiry."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from shop import Job, Order
from sqlalchemy import Connection, Engine, event, text
from steps import KEEP, TABLES, ask, autocommit, candidates, claimed, expire, put_many, run
from workers import until_row, working

from sqla_jobs.context import AsyncJobContext, JobContext
from sqla_jobs.core.leases import Lease
from sqla_jobs.core.lifecycle import DONE, JobStatus, Returned, Verdict, judge
from sqla_jobs.core.retry import Retry
from sqla_jobs.store.lease import prolong
from sqla_jobs.store.rescue import Refused, cancel_expired, expired_leases
from sqla_jobs.store.settle import settle, settle_expired, settle_within
from sqla_jobs.tasks import Jobs

#: A user's table points at a job: it cannot leave the jobs table.
FOREIGN_KEY = (
    "CREATE TABLE notes (job bigint, queue text, FOREIGN KEY (job, queue) REFERENCES background_jobs)",
    "INSERT INTO notes SELECT id, queue FROM background_jobs WHERE id = 3",
)
#: A user's trigger on the archive refuses it.
ARCHIVE = (
    (
        "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN IF NEW.id = 3 THEN RAISE EXCEPTION 'not this one'; END IF; RETURN NEW; END $$"
    ),
    "CREATE TRIGGER no BEFORE INSERT ON background_jobs_archive FOR EACH ROW EXECUTE FUNCTION no()",
)


def frozen(which: str) -> tuple[str, ...]:
    """Another lets nobody change these rows at all."""
    return (
        (
            "CREATE FUNCTION never() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN IF {which} THEN RAISE EXCEPTION 'never'; END IF; RETURN coalesce(NEW, OLD); END $$"
        ),
        (
            "CREATE TRIGGER never BEFORE UPDATE OR DELETE ON background_jobs "
            "FOR EACH ROW EXECUTE FUNCTION never()"
        ),
    )


FROZEN = frozen("OLD.id = 3")


@pytest.fixture
def own(engine: Engine) -> Iterator[Connection]:
    """A database that the test may alter."""
    with autocommit(engine) as connection:
        yield connection


def refuse(connection: Connection, statements: tuple[str, ...]) -> None:
    for statement in statements:
        run(connection, statement)


def statuses(connection: Connection) -> dict[int, str]:
    found = connection.execute(
        text(
            "SELECT id, status FROM background_jobs UNION ALL SELECT id, status FROM background_jobs_archive"
        )
    )
    return {id_: status for id_, status in found}  # noqa: C416


@pytest.mark.parametrize("refusal", [FOREIGN_KEY, ARCHIVE], ids=["foreign key", "archive"])
def test_a_rescued_row_that_cannot_be_archived_is_cancelled_in_place(
    own: Connection, refusal: tuple[str, ...]
) -> None:
    put_many(own, 5)
    leases = [job.lease for job in claimed(own, limit=5)]
    run(own, "UPDATE background_jobs SET cancel_requested_at = now()")
    refuse(own, refusal)
    expire(own, *leases)

    settled = settle_expired(own, TABLES, candidates(own), retention=KEEP)

    assert sorted(lease.id for lease, _ in settled.written) == [1, 2, 3, 4, 5]
    assert [lease.id for (lease, _), _ in settled.kept] == [3]
    assert statuses(own) == dict.fromkeys(range(1, 6), "cancelled")
    assert ask(own, "SELECT status FROM background_jobs") == "cancelled"


def test_a_row_that_cannot_be_written_at_all_comes_back_and_the_others_are_rescued(own: Connection) -> None:
    put_many(own, 5)
    leases = [job.lease for job in claimed(own, limit=5)]
    expire(own, *leases)
    refuse(own, FROZEN)

    settled = settle_expired(own, TABLES, candidates(own), retention=KEEP)

    assert [lease.id for (lease, _), _ in settled.refused] == [3]
    assert "never" in settled.refused[0][1]
    assert statuses(own) == {1: "ready", 2: "ready", 3: "running", 4: "ready", 5: "ready"}


@pytest.mark.parametrize("refusal", [FOREIGN_KEY, ARCHIVE], ids=["foreign key", "archive"])
def test_an_expired_row_that_cannot_be_archived_is_cancelled_in_place(
    own: Connection, refusal: tuple[str, ...]
) -> None:
    put_many(own, 5)
    run(own, "UPDATE background_jobs SET expires_at = now() - interval '1 second'")
    refuse(own, refusal)

    expired = cancel_expired(own, TABLES, queue="default", retention=KEEP)

    assert (sorted(expired.cancelled), expired.refused) == ([1, 2, 3, 4, 5], [])
    assert statuses(own) == dict.fromkeys(range(1, 6), "cancelled")
    left = own.execute(text("SELECT id, last_error, finished_at IS NOT NULL FROM background_jobs"))
    assert left.all() == [(3, "expired", True)]


@pytest.mark.parametrize("place", [1, 3, 5])
def test_an_expired_row_that_cannot_be_written_at_all_comes_back_and_the_others_are_cancelled(
    own: Connection, place: int
) -> None:
    put_many(own, 5)
    run(own, "UPDATE background_jobs SET expires_at = now() - interval '1 second'")
    refuse(own, frozen("OLD.id = " + str(place)))

    expired = cancel_expired(own, TABLES, queue="default", retention=KEEP)

    assert sorted(expired.cancelled) == [id_ for id_ in range(1, 6) if id_ != place]
    assert expired.refused == [Refused(place, "noop", "RaiseException: never")]
    assert statuses(own) == dict.fromkeys(range(1, 6), "cancelled") | {place: "ready"}


def test_a_look_leaves_out_what_was_refused_already(own: Connection) -> None:
    put_many(own, 4)
    expire(own, *[job.lease for job in claimed(own, limit=4)])
    put_many(own, 4)
    run(own, "UPDATE background_jobs SET expires_at = now() - interval '1 second' WHERE status = 'ready'")

    leases = expired_leases(own, TABLES, queue="default", beside=[1, 3])
    late = cancel_expired(own, TABLES, queue="default", retention=KEEP, beside=[5, 7])

    assert sorted(each.lease.id for each in leases) == [2, 4]
    assert sorted(late.cancelled) == [6, 8]


@pytest.mark.parametrize("left", ["leases", "expiries"])
async def test_more_refused_rows_than_a_pass_looks_at_keep_no_other_waiting(
    engine: Engine, database_url: str, own: Connection, left: str
) -> None:
    """They are the oldest: without more ado every look would find them, and nothing else."""
    jobs = Jobs(Job)

    @jobs.task(name="noop")
    def noop() -> None: ...

    put_many(own, 252)
    if left == "leases":
        expire(own, *[job.lease for job in claimed(own, limit=252)])
        run(own, "UPDATE background_jobs SET locked_until = locked_until + id * interval '1 us'")
    else:
        run(own, "UPDATE background_jobs SET expires_at = now() - interval '1 h' + id * interval '1 us'")
    refuse(own, frozen("OLD.id <= 251"))

    async with working(jobs, database_url, lease=timedelta(seconds=8)):
        await until_row(
            engine,
            "SELECT 1 FROM background_jobs WHERE id = 252 AND status = 'ready' AND fencing_token > 0 "
            "UNION ALL SELECT 1 FROM background_jobs_archive WHERE id = 252",
        )

    assert {statuses(own)[id_] for id_ in range(1, 252)} == {"running" if left == "leases" else "ready"}


async def test_a_worker_tells_what_it_could_not_cancel(database_url: str, own: Connection) -> None:
    jobs = Jobs(Job)

    @jobs.task(name="noop")
    def noop() -> None: ...

    put_many(own, 3)
    run(own, "UPDATE background_jobs SET expires_at = now() - interval '1 second'")
    refuse(own, FROZEN)

    async with working(jobs, database_url, lease=timedelta(seconds=2)) as (_, heard):
        refused = await heard.event("outcome.refused")
        cancelled = await heard.event("job.expired")

    assert refused.fields == {"job": 3, "queue": "default", "kind": "noop", "error": "RaiseException: never"}
    assert sorted(cancelled.fields["jobs"]) == [1, 2]  # type: ignore[call-overload]
    assert heard.named("database.error") == []


async def test_a_worker_tells_what_it_could_not_rescue(
    engine: Engine, database_url: str, own: Connection
) -> None:
    jobs = Jobs(Job)

    @jobs.task(name="noop")
    def noop() -> None: ...

    put_many(own, 3)
    expire(own, *[job.lease for job in claimed(own, limit=3)])
    refuse(own, FROZEN)

    async with working(jobs, database_url, lease=timedelta(seconds=2)) as (_, heard):
        event = await heard.event("outcome.refused")
        await until_row(engine, "SELECT 1 FROM background_jobs_archive HAVING count(*) = 2", patience=30)

    assert (event.fields["job"], event.fields["kind"]) == (3, "noop")
    assert statuses(own)[3] == JobStatus.RUNNING


# -- settled through ctx.session: what the handler wrote must not suffer for a row that cannot leave


def writing(form: str) -> Jobs:
    """A job that writes an order through its session."""
    jobs = Jobs(Job)
    once = Retry(max_attempts=1)

    if form == "thread":

        @jobs.task(name="noop", retry=once)
        def in_thread(ctx: JobContext) -> None:
            ctx.session.add(Order(customer=str(ctx.id)))
    else:

        @jobs.task(name="noop", retry=once)
        async def in_loop(ctx: AsyncJobContext) -> None:
            ctx.session.add(Order(customer=str(ctx.id)))

    return jobs


@pytest.mark.parametrize("form", ["thread", "loop"])
@pytest.mark.parametrize("refusal", [FOREIGN_KEY, ARCHIVE], ids=["foreign key", "archive"])
async def test_what_a_handler_wrote_commits_although_its_row_cannot_be_archived(
    database_url: str, own: Connection, form: str, refusal: tuple[str, ...]
) -> None:
    put_many(own, 5)
    refuse(own, refusal)

    async with working(writing(form), database_url) as (_, heard):
        await heard.settled(5)

    assert statuses(own) == dict.fromkeys(range(1, 6), "done")
    assert own.execute(text("SELECT id, status, attempts, last_error FROM background_jobs")).all() == [
        (3, "done", 1, None)
    ]
    assert sorted(own.scalars(text("SELECT customer FROM orders"))) == ["1", "2", "3", "4", "5"]
    [event] = heard.named("archive.refused")
    assert (event.fields["job"], event.fields["queue"], event.fields["kind"]) == (3, "default", "noop")
    assert heard.named("lease.lost") == []


@pytest.mark.parametrize("form", ["thread", "loop"])
async def test_what_a_handler_wrote_is_rolled_back_when_its_row_cannot_be_written_at_all(
    database_url: str, own: Connection, form: str
) -> None:
    """The rule lets nobody end this job well; its failure is recorded."""
    put_many(own, 3)
    run(own, "UPDATE background_jobs SET max_attempts = 1")
    refuse(own, frozen("OLD.id = 3 AND (TG_OP = 'DELETE' OR NEW.status = 'done')"))

    async with working(writing(form), database_url) as (_, heard):
        await heard.settled(3)

    assert statuses(own) == {1: "done", 2: "done", 3: "failed"}
    assert "never" in ask(own, "SELECT last_error FROM background_jobs")
    assert sorted(own.scalars(text("SELECT customer FROM orders"))) == ["1", "2"]


@pytest.mark.parametrize("refusal", [FOREIGN_KEY, ARCHIVE], ids=["foreign key", "archive"])
@pytest.mark.parametrize("verdict", [DONE, judge(Returned("7"), attempt=1, max_attempts=1)], ids=str)
def test_a_row_that_cannot_be_archived_is_settled_in_place_in_the_callers_transaction(
    engine: Engine, own: Connection, refusal: tuple[str, ...], verdict: Verdict
) -> None:
    put_many(own, 3)
    leases = sorted(job.lease for job in claimed(own, limit=3))
    refuse(own, refusal)

    with engine.begin() as handler:
        run(handler, "INSERT INTO orders (customer) VALUES ('Ada')")
        settled = settle_within(handler, TABLES, (leases[2], verdict), retention=KEEP)
        late = settle_within(handler, TABLES, (leases[1]._replace(token=7), verdict), retention=KEEP)

    assert settled is not None
    assert settled.written == [(leases[2], verdict)]
    assert [entry for entry, _ in settled.kept] == [(leases[2], verdict)]
    assert late is None
    assert statuses(own) == {1: "running", 2: "running", 3: "done"}
    assert ask(own, "SELECT result FROM background_jobs WHERE id = 3") == (7 if verdict.result else None)
    assert ask(own, "SELECT count(*) FROM orders") == 1


def test_a_lease_that_is_lost_stays_lost_when_its_row_could_not_be_archived_either(
    engine: Engine, own: Connection
) -> None:
    """The way in place is behind the same fence."""
    put_many(own, 3)
    leases = sorted(job.lease for job in claimed(own, limit=3))
    refuse(own, FOREIGN_KEY)

    with engine.begin() as handler:
        stolen = leases[2]._replace(owner="somebody else")
        assert settle_within(handler, TABLES, (stolen, DONE), retention=KEEP) is None

    assert statuses(own) == {1: "running", 2: "running", 3: "running"}


# -- between the statement that was refused and the one that ends the row in place, the row is free


@contextmanager
def before_the_second_try(connection: Connection, step: Callable[[], object]) -> Iterator[list[str]]:
    """Do this when the first statement on the job has failed and the next is about to be sent."""
    sent: list[str] = []

    def look(_c: object, _cursor: object, statement: str, *_: object) -> None:
        if "WITH held AS" not in statement:
            return
        sent.append(statement)
        if len(sent) == 2:
            step()

    event.listen(connection, "before_cursor_execute", look)
    try:
        yield sent
    finally:
        event.remove(connection, "before_cursor_execute", look)


@pytest.fixture
def other(engine: Engine) -> Iterator[Connection]:
    """Somebody else."""
    with engine.connect() as connection:
        yield connection


def the_third(connection: Connection) -> Lease:
    """Three jobs run, the third of which cannot leave the table."""
    put_many(connection, 3)
    leases = sorted(job.lease for job in claimed(connection, limit=3))
    refuse(connection, FOREIGN_KEY)
    return leases[2]


def test_a_lease_prolonged_in_between_is_not_rescued(own: Connection, other: Connection) -> None:
    lease = the_third(own)
    run(own, "UPDATE background_jobs SET cancel_requested_at = now()")
    expire(own, lease)
    found = candidates(own)

    def prolong_it() -> None:
        assert prolong(other, TABLES, [lease], lease=timedelta(minutes=1)).kept == [lease]
        other.commit()

    with before_the_second_try(own, prolong_it) as sent:
        settled = settle_expired(own, TABLES, found, retention=KEEP)

    assert len(sent) == 2
    assert (settled.written, settled.refused) == ([], [])
    assert statuses(own) == {1: "running", 2: "running", 3: "running"}


def test_a_row_that_somebody_takes_hold_of_in_between_is_busy(own: Connection, other: Connection) -> None:
    entry = (the_third(own), DONE)

    def hold_it() -> None:
        run(other, "SELECT 1 FROM background_jobs WHERE id = 3 FOR UPDATE")

    with before_the_second_try(own, hold_it) as sent:
        first = settle(own, TABLES, [entry], retention=KEEP)
    other.rollback()
    second = settle(own, TABLES, first.busy, retention=KEEP)

    assert len(sent) == 2
    assert (first.busy, first.written) == ([entry], [])
    assert second.written == [entry]
    assert statuses(own)[3] == "done"


def test_a_lease_stolen_in_between_is_lost_to_its_handler(
    engine: Engine, own: Connection, other: Connection
) -> None:
    lease = the_third(own)

    def steal_it() -> None:
        run(other, "UPDATE background_jobs SET fencing_token = 9, locked_by = 'thief' WHERE id = 3")
        other.commit()

    with engine.connect() as handler, before_the_second_try(handler, steal_it) as sent:
        run(handler, "INSERT INTO orders (customer) VALUES ('Ada')")
        settled = settle_within(handler, TABLES, (lease, DONE), retention=KEEP)
        handler.rollback()

    assert len(sent) == 2
    assert settled is None
    assert ask(own, "SELECT status || locked_by FROM background_jobs WHERE id = 3") == "runningthief"


async def test_a_failure_whose_text_is_refused_is_recorded_without_it(
    engine: Engine, database_url: str, own: Connection
) -> None:
    jobs = Jobs(Job)

    @jobs.task(name="job", retry=Retry(max_attempts=1))
    def job() -> None:
        raise ValueError("the forbidden word")

    run(
        own,
        "CREATE FUNCTION clean() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF NEW.last_error LIKE '%forbidden%' THEN RAISE EXCEPTION 'no'; END IF; RETURN NEW; END $$",
    )
    run(own, "CREATE TRIGGER clean BEFORE UPDATE ON background_jobs FOR EACH ROW EXECUTE FUNCTION clean()")
    run(own, "INSERT INTO background_jobs (kind, max_attempts) VALUES ('job', 1)")

    async with working(jobs, database_url) as (_, heard):
        assert await heard.settled(1) == [JobStatus.FAILED]

    assert own.execute(text("SELECT status, last_error FROM background_jobs")).all() == [
        ("failed", "(the database refused the text of this error)")
    ]
    assert len(heard.named("outcome.refused")) == 1
