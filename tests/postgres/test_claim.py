"""Claiming: the right jobs, in order, never too many, never somebody else's, never waiting."""

from datetime import timedelta
from itertools import product

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import IntegrityError
from steps import (
    LEASE,
    TABLES,
    alive,
    ask,
    autocommit,
    backend,
    claimed,
    expire,
    judged,
    listening,
    meanwhile,
    put,
    put_many,
    rescue,
    run,
    statuses,
    take,
    take_one,
    until_blocked,
    written,
)

from sqla_jobs.core.leases import Lease
from sqla_jobs.core.lifecycle import Raised, Released, Snoozed
from sqla_jobs.store.claim import ClaimedJob, claim_statement, next_due_in, release_unknown

AGO, SOON = "statement_timestamp() - interval '1 minute'", "statement_timestamp() + interval '1 hour'"


def ids(jobs: list[ClaimedJob]) -> list[int]:
    return [job.lease.id for job in jobs]


def put_at(connection: Connection, moment: str, *, priority: int = 0, queue: str = "default") -> int:
    """Insert a job that is due at an SQL expression."""
    statement = (
        f"INSERT INTO background_jobs (kind, run_at, priority, queue) "
        f"VALUES ('noop', {moment}, :priority, :queue) RETURNING id"
    )
    id_: int = ask(connection, statement, priority=priority, queue=queue)
    return id_


# -- what a claim writes and returns


def test_a_claim_starts_an_attempt_under_a_lease(a: Connection) -> None:
    job = put(a, "receipts.send", payload='{"order": 7}', priority=3, max_attempts=5)

    [it] = claimed(a, "A", lease=timedelta(seconds=90))

    row = alive(a, job)
    assert it.lease == Lease("default", job, 1, "A")
    assert (it.kind, it.payload, it.attempt, it.max_attempts, it.priority) == (
        "receipts.send", '{"order": 7}', 1, 5, 3,
    )  # fmt: skip
    assert it.due == pytest.approx(row["run_at"].timestamp(), abs=1e-5)
    assert (row["status"], row["attempts"], row["fencing_token"], row["locked_by"]) == ("running", 1, 1, "A")
    assert row["started_at"] is not None
    assert ask(a, "SELECT locked_until - started_at FROM background_jobs") - timedelta(
        seconds=90
    ) < timedelta(seconds=1)


def test_the_token_grows_with_every_claim_also_when_the_attempt_is_given_back(a: Connection) -> None:
    job = put(a)

    tokens = []
    for _ in range(3):
        lease = take_one(a)
        tokens.append(lease.token)
        assert written(a, (lease, judged(Snoozed(timedelta(seconds=1))))).written
        run(a, "UPDATE background_jobs SET run_at = statement_timestamp()")

    assert tokens == [1, 2, 3]
    assert alive(a, job)["attempts"] == 0


def test_a_new_attempt_forgets_the_progress_of_the_last(a: Connection) -> None:
    job = put(a, progress='{"fraction": 0.5}')

    take_one(a)

    assert ask(a, "SELECT progress IS NULL FROM background_jobs WHERE id = :id", id=job) is True


def test_an_empty_queue_gives_nothing(a: Connection) -> None:
    assert claimed(a, limit=10) == []


def test_a_claim_takes_jobs_of_its_queue_only(a: Connection) -> None:
    put(a, queue="mail")
    wanted = put(a, queue="files")

    assert ids(claimed(a, limit=10, queue="files")) == [wanted]


def test_jobs_of_other_queues_take_no_place_in_a_claims_limit(a: Connection) -> None:
    for _ in range(3):
        put(a, queue="mail", priority=9)
    wanted = put(a, queue="files")

    assert ids(claimed(a, limit=1, queue="files")) == [wanted]


@pytest.mark.parametrize("status", ["blocked", "failed", "done", "cancelled"])
def test_a_claim_takes_ready_jobs_only(a: Connection, status: str) -> None:
    put(a, status=status)

    assert claimed(a, limit=10) == []


def test_a_payload_is_handed_on_as_text_whatever_it_is(a: Connection) -> None:
    for payload in "null", "[1]", '"text"', '{"n": 1e400}':
        put(a, payload=payload)

    payloads = [job.payload for job in claimed(a, limit=10)]

    assert payloads[:3] == ["null", "[1]", '"text"']
    assert payloads[3].startswith('{"n": 1000')


# -- order and limit


def test_the_order_is_priority_then_due_time_then_id(a: Connection) -> None:
    late, early = "statement_timestamp() - interval '1 second'", "statement_timestamp() - interval '1 hour'"
    low_early = put_at(a, early, priority=-1)
    high_late = put_at(a, late, priority=9)
    run(a, "SELECT set_config('sqla_jobs.same', statement_timestamp()::text, false)")
    middle_late = put_at(a, late)
    first_twin = put_at(a, "current_setting('sqla_jobs.same')::timestamptz - interval '1 minute'")
    second_twin = put_at(a, "current_setting('sqla_jobs.same')::timestamptz - interval '1 minute'")
    middle_early = put_at(a, early)
    high_early = put_at(a, early, priority=9)
    expected = [high_early, high_late, middle_early, first_twin, second_twin, middle_late, low_early]

    assert ids(claimed(a, limit=3)) == expected[:3]
    assert ids(claimed(a, limit=3)) == expected[3:6]
    assert ids(claimed(a, limit=3)) == expected[6:]


SWITCHES = ["hashjoin", "mergejoin", "sort", "indexscan", "bitmapscan", "memoize", "material"]
# each switch off alone, all of them, and the mixtures that push a plan towards nested loops
OFF = [
    (),
    *[(switch,) for switch in SWITCHES],
    ("hashjoin", "mergejoin"),
    ("hashjoin", "mergejoin", "material"),
    ("hashjoin", "mergejoin", "memoize", "material"),
    ("indexscan", "bitmapscan"),
    ("hashjoin", "mergejoin", "sort", "indexscan", "bitmapscan"),
    tuple(SWITCHES),
]


@pytest.mark.parametrize(
    ("count", "analysed"), [(10, True), (10, False), (1000, True), (1000, False)], ids=str
)
def test_no_plan_makes_a_claim_take_more_than_its_limit(clean: Engine, count: int, analysed: bool) -> None:
    """Field case B30."""
    with autocommit(clean) as connection:
        put_many(connection, count)
        if analysed:
            run(connection, "ANALYZE background_jobs")
    taken = {}

    with clean.connect() as connection:
        for off, limit, mode in product(OFF, (1, 5), ("auto", "force_generic_plan")):
            for switch in off:
                run(connection, f"SET LOCAL enable_{switch} = off")
            run(connection, f"SET LOCAL plan_cache_mode = {mode}")
            returned = len(claimed(connection, limit=limit))
            changed = ask(connection, "SELECT count(*) FROM background_jobs WHERE status = 'running'")
            taken[off, limit, mode] = returned, changed
            connection.rollback()

    assert taken == {case: (case[1], case[1]) for case in taken}
    assert len(taken) == len(OFF) * 4


# -- several claimers


def test_two_claimers_get_different_jobs_and_do_not_wait(clean: Engine, a: Connection) -> None:
    jobs = put_many(a, 6)

    with clean.connect() as first, clean.connect() as second:
        run(second, "SET LOCAL lock_timeout = '1ms'")  # to wait at all is an error
        taken_first = take(first, "A", limit=3)
        taken_second = take(second, "B", limit=3)
        first.commit()
        second.commit()

    assert [lease.id for lease in taken_first] == jobs[:3]
    assert [lease.id for lease in taken_second] == jobs[3:]


def test_a_claim_that_is_rolled_back_leaves_its_jobs_to_others(clean: Engine, a: Connection) -> None:
    job = put(a)

    with clean.connect() as first:
        take_one(first, "A")
        assert claimed(a, "B") == []
        first.rollback()

    assert take_one(a, "B") == Lease("default", job, 1, "B")


def test_a_job_that_changed_between_look_and_lock_is_judged_as_it_is_now(
    clean: Engine, a: Connection, b: Connection
) -> None:
    """A's claim has its snapshot; B claims, fails and commits; A goes on and sees the row as it is now."""
    job = put(a)
    with clean.connect() as keeper, clean.connect() as slow:
        run(keeper, "SELECT pg_advisory_xact_lock(1)")
        waiting, holding = backend(slow), backend(keeper)

        with meanwhile(lambda: _claim_through_gate(slow)) as answer:
            until_blocked(a, waiting, by=holding)
            lease = take_one(b, "B")
            assert written(b, (lease, judged(Raised("boom", timedelta(hours=1))))).written
            keeper.commit()
        slow.commit()

    row = alive(b, job)
    assert answer.result() == []
    assert (row["status"], row["attempts"], row["fencing_token"]) == ("ready", 1, 1)


def test_a_job_given_back_between_look_and_lock_is_claimed_with_its_new_token(
    clean: Engine, a: Connection, b: Connection
) -> None:
    job = put(a)
    with clean.connect() as keeper, clean.connect() as slow:
        run(keeper, "SELECT pg_advisory_xact_lock(1)")
        waiting, holding = backend(slow), backend(keeper)

        with meanwhile(lambda: _claim_through_gate(slow)) as answer:
            until_blocked(a, waiting, by=holding)
            assert written(b, (take_one(b, "B"), judged(Released()))).written
            keeper.commit()
        slow.commit()

    assert answer.result() == [(job, 2)]
    assert (alive(b, job)["locked_by"], alive(b, job)["attempts"]) == ("A", 1)


def _claim_through_gate(connection: Connection) -> list[tuple[int, int]]:
    """The claim's own text, in whose sub-select a gate (an advisory lock) comes after the snapshot."""
    sql = str(claim_statement(TABLES.jobs).compile(connection))
    start = "WHERE background_jobs.queue = %(q)s::VARCHAR AND background_jobs.status = 'ready' AND"
    head, inner, tail = sql.rpartition(start)
    assert inner
    assert tail.count("ORDER BY") == sql.count("ORDER BY") == 1
    gate = "WHERE (SELECT 1 FROM pg_advisory_xact_lock_shared(1)) = 1 AND"
    parameters = {"q": "default", "owner": "A", "limit": 5, "lease": LEASE, "prefetch": False}
    rows = connection.exec_driver_sql(head + gate + inner.removeprefix("WHERE") + tail, parameters)
    return [(row[0], row[1]) for row in rows]


def test_a_users_foreign_key_to_a_job_does_not_hide_it(clean: Engine, a: Connection) -> None:
    job = put(a)
    with clean.connect() as user:
        # what a foreign key takes when a row that points to the job is inserted (manual 13.3.2)
        run(user, "SELECT 1 FROM background_jobs WHERE id = :id AND queue = 'default' FOR KEY SHARE", id=job)

        assert take_one(a, "A").id == job


# -- not yet, or not any more


def test_a_job_is_not_claimed_before_it_is_due(a: Connection) -> None:
    put_at(a, SOON)
    put_at(a, "'infinity'")
    due = put_at(a, AGO)
    oldest = put_at(a, "'-infinity'")

    assert ids(claimed(a, limit=10)) == [oldest, due]


def test_due_is_judged_by_the_statements_time_and_not_by_that_of_its_transaction(
    clean: Engine, a: Connection
) -> None:
    with clean.connect() as old:
        ask(old, "SELECT now()")
        job = put(a)  # after that transaction began

        assert ids(claimed(old)) == [job]


def test_an_expired_job_that_was_never_claimed_is_not_started(a: Connection) -> None:
    put(a)
    run(a, f"UPDATE background_jobs SET expires_at = {AGO}")

    assert claimed(a, limit=10) == []


def test_an_expired_job_that_was_claimed_before_goes_on(a: Connection) -> None:
    put(a)
    run(a, f"UPDATE background_jobs SET expires_at = {SOON}")
    lease = take_one(a)
    written(a, (lease, judged(Raised("boom", timedelta(0)))))
    run(a, f"UPDATE background_jobs SET expires_at = {AGO}")

    assert len(claimed(a)) == 1


def test_a_job_that_will_expire_later_is_claimed(a: Connection) -> None:
    put(a)
    run(a, f"UPDATE background_jobs SET expires_at = {SOON}")

    assert len(claimed(a)) == 1


def test_a_prefetch_leaves_last_attempts_to_free_slots(a: Connection) -> None:
    only = put(a, max_attempts=1)
    last = put(a, max_attempts=3, attempts=2)
    other = put(a, max_attempts=3, attempts=1)

    assert ids(claimed(a, limit=10, prefetch=True)) == [other]
    assert ids(claimed(a, limit=10)) == [only, last]


def test_a_prefetch_looks_past_last_attempts_for_its_limit(a: Connection) -> None:
    for _ in range(3):
        put(a, max_attempts=1)
    others = put_many(a, 3)

    assert ids(claimed(a, limit=2, prefetch=True)) == others[:2]


def test_a_job_with_an_ordering_key_is_refused_until_such_keys_exist(a: Connection) -> None:
    with pytest.raises(IntegrityError, match="ordering_key"):
        put(a, ordering_key="customer 7")


# -- the end of the lease


def test_a_lease_counts_from_the_claim_also_in_a_transaction_that_is_open_for_long(clean: Engine) -> None:
    with clean.begin() as connection:
        ask(connection, "SELECT now()")
        put(connection)
        run(connection, "SELECT pg_sleep(0.3)")
        claimed(connection, lease=timedelta(seconds=60))

        lease, age = connection.execute(
            text("SELECT locked_until - clock_timestamp(), clock_timestamp() - now() FROM background_jobs")
        ).one()

    assert age >= timedelta(seconds=0.3)
    assert lease > timedelta(seconds=60) - timedelta(seconds=0.25)


# -- when the next one is due


def test_without_jobs_that_wait_for_their_time_nothing_is_due(a: Connection) -> None:
    put(a)
    put_at(a, SOON, queue="mail")
    put_at(a, "'infinity'")

    assert next_due_in(a, TABLES, queue="default") is None


@pytest.mark.parametrize("priorities", [[0], [0, 0, 0], [5, 4, 3, 2, 1, 0, -1], [32767, 0, -32768, 0]])
def test_the_next_due_time_is_the_least_over_all_priorities(a: Connection, priorities: list[int]) -> None:
    for number, priority in enumerate(priorities):
        put_at(a, AGO, priority=priority)
        # the lowest priority is due first
        put_at(a, f"statement_timestamp() + interval '{1000 - number} seconds'", priority=priority)
    run(a, f"UPDATE background_jobs SET expires_at = {SOON}")
    put(a, status="blocked", run_at="2999-01-01")

    due_in = next_due_in(a, TABLES, queue="default")

    plain = ask(
        a,
        "SELECT extract(epoch FROM min(run_at) - clock_timestamp())::float8 FROM background_jobs "
        "WHERE queue = 'default' AND status = 'ready' AND run_at > statement_timestamp()",
    )
    assert due_in == pytest.approx(plain, abs=5)
    assert due_in == pytest.approx(1001 - len(priorities), abs=5)


def test_a_parked_job_hides_no_other_that_is_due_sooner(a: Connection) -> None:
    put_at(a, "'infinity'", priority=1)
    put_at(a, SOON)

    due_in = next_due_in(a, TABLES, queue="default")

    assert due_in == pytest.approx(3600, abs=5)


def test_a_job_parked_for_ever_has_no_due_time(a: Connection) -> None:
    put_at(a, "'infinity'")

    assert next_due_in(a, TABLES, queue="default") is None


# -- a claim whose answer was lost


def test_what_a_lost_answer_claimed_is_given_back_with_its_attempt(a: Connection, clean_url: str) -> None:
    known, unknown, other = put_many(a, 3)
    take(a, "A", limit=2)
    take_one(a, "B")

    with listening(clean_url) as ear:
        released = release_unknown(a, TABLES, queue="default", owner="A", known=[known])
        messages = ear.heard()

    row = alive(a, unknown)
    assert released == 1
    assert statuses(a) == {known: "running", unknown: "ready", other: "running"}
    assert (row["attempts"], row["fencing_token"]) == (0, 1)
    assert (row["locked_by"], row["locked_until"], row["started_at"]) == (None, None, None)
    assert [message.split(" ", 2)[::2] for message in messages] == [["0", "default"]]


def test_with_every_claim_known_nothing_is_given_back(a: Connection, clean_url: str) -> None:
    jobs = put_many(a, 2)
    take(a, "A", limit=2)

    with listening(clean_url) as ear:
        assert release_unknown(a, TABLES, queue="default", owner="A", known=jobs) == 0
        assert ear.heard() == []


def test_with_no_claim_known_all_of_ours_are_given_back(a: Connection) -> None:
    put_many(a, 2)
    put(a, queue="mail")
    take(a, "A", limit=2)
    take_one(a, "A", queue="mail")

    assert release_unknown(a, TABLES, queue="default", owner="A", known=[]) == 2
    assert ask(a, "SELECT count(*) FROM background_jobs WHERE status = 'running'") == 1


def test_a_job_that_somebody_set_back_by_hand_is_not_given_back_once_more(a: Connection) -> None:
    job = put(a)
    take_one(a)
    run(a, "UPDATE background_jobs SET status = 'ready'")  # and forgot the lease, as people do
    before = alive(a, job)

    assert release_unknown(a, TABLES, queue="default", owner="A", known=[]) == 0
    assert alive(a, job) == before


def test_an_unknown_claim_that_somebody_holds_keeps_no_other_from_being_given_back(
    clean: Engine, a: Connection
) -> None:
    held, free = put_many(a, 2)
    take(a, limit=2)
    run(a, "SET lock_timeout = '1ms'")  # to wait at all is an error

    with clean.connect() as user:
        run(user, "SELECT 1 FROM background_jobs WHERE id = :id FOR UPDATE", id=held)
        first = release_unknown(a, TABLES, queue="default", owner="A", known=[])
        user.rollback()
    second = release_unknown(a, TABLES, queue="default", owner="A", known=[])

    run(a, "RESET lock_timeout")
    assert (first, second) == (1, 1)
    assert statuses(a) == {held: "ready", free: "ready"}


def test_an_attempt_given_back_as_unknown_cannot_be_settled_by_its_late_answer(a: Connection) -> None:
    job = put(a)
    lease = take_one(a)
    release_unknown(a, TABLES, queue="default", owner="A", known=[])
    before = alive(a, job)

    written(a, (lease, judged(Raised("boom", None))))

    assert alive(a, job) == before


def test_an_unknown_claim_that_was_cancelled_meanwhile_is_left_to_the_rescue(a: Connection) -> None:
    """To give it back would run it once more, and a cancel ends every attempt but one that returns."""
    job = put(a)
    lease = take_one(a)
    run(a, "UPDATE background_jobs SET cancel_requested_at = clock_timestamp()")

    released = release_unknown(a, TABLES, queue="default", owner="A", known=[])
    expire(a, lease)
    rescue(a)

    assert released == 0
    assert statuses(a) == {job: "cancelled"}
