"""Guarantee 3: who has lost a lease changes nothing. Each test writes its interleaving down."""

from datetime import timedelta

import pytest
from sqlalchemy import Connection, Engine, text
from steps import (
    KEEP,
    LEASE,
    TABLES,
    Row,
    alive,
    archive,
    ask,
    backend,
    candidates,
    everything,
    expire,
    judged,
    live,
    meanwhile,
    put,
    rescue,
    run,
    statuses,
    take_one,
    until_blocked,
    written,
)

from sqla_jobs.core.lifecycle import (
    DONE,
    Aborted,
    JobStatus,
    Lost,
    Raised,
    Released,
    Returned,
    Snoozed,
    Verdict,
)
from sqla_jobs.core.retention import Retention
from sqla_jobs.store.claim import release_unknown
from sqla_jobs.store.lease import prolong
from sqla_jobs.store.rescue import cancel_expired
from sqla_jobs.store.settle import settle_expired, settle_within

FAILED = judged(Raised("boom", None))
RETRY = judged(Raised("boom", timedelta(seconds=30)))
CANCELLED = judged(Aborted("not wanted"))
VERDICTS = {
    "done": DONE,
    "done with a result": judged(Returned('{"sum": 7}')),
    "failed": FAILED,
    "retry": RETRY,
    "snooze": judged(Snoozed(timedelta(minutes=5))),
    "release": judged(Released()),
    "cancel": CANCELLED,
}
every_verdict = pytest.mark.parametrize("verdict", VERDICTS.values(), ids=list(VERDICTS))


# -- a stale worker


@every_verdict
def test_a_stale_worker_cannot_settle_a_reclaimed_job(a: Connection, b: Connection, verdict: Verdict) -> None:
    put(a)
    lost = take_one(a, "A")
    expire(a, lost)
    rescue(b)
    take_one(b, "B")
    before = everything(b)

    settled = written(a, (lost, verdict))

    assert settled.stale == [(lost, verdict)]
    assert not settled.written
    assert everything(b) == before


@every_verdict
def test_a_stale_worker_cannot_settle_a_job_that_waits_after_its_rescue(
    a: Connection, b: Connection, verdict: Verdict
) -> None:
    put(a)
    lost = take_one(a, "A")
    expire(a, lost)
    rescue(b)
    before = everything(b)

    settled = written(a, (lost, verdict))

    assert settled.stale == [(lost, verdict)]
    assert everything(b) == before


@every_verdict
def test_an_expired_attempt_of_a_worker_cannot_settle_its_own_second_attempt(
    a: Connection, verdict: Verdict
) -> None:
    put(a)
    first = take_one(a, "A")
    expire(a, first)
    rescue(a)
    second = take_one(a, "A")
    before = everything(a)

    settled = written(a, (first, verdict))

    assert (second.id, second.owner) == (first.id, first.owner)
    assert settled.stale == [(first, verdict)]
    assert everything(a) == before


@every_verdict
def test_after_a_restore_to_a_point_in_time_the_owner_decides(
    a: Connection, b: Connection, verdict: Verdict
) -> None:
    put(a)
    lost = take_one(a, "A")
    # the restore took the token back, and B's claim gave it out once more
    run(a, "UPDATE background_jobs SET status = 'ready', fencing_token = 0, locked_by = NULL")
    assert take_one(b, "B") == lost._replace(owner="B")
    before = everything(b)

    settled = written(a, (lost, verdict))

    assert settled.stale == [(lost, verdict)]
    assert everything(b) == before


def test_a_lease_of_another_queue_settles_nothing(a: Connection) -> None:
    put(a, queue="mail")
    lease = take_one(a, "A", queue="mail")._replace(queue="default")
    before = everything(a)

    assert written(a, (lease, DONE)).stale == [(lease, DONE)]
    assert written(a, (lease, RETRY)).stale == [(lease, RETRY)]
    assert prolong(a, TABLES, [lease], lease=LEASE).lost == [lease]
    assert everything(a) == before


@pytest.mark.parametrize("verdict", [DONE, RETRY, CANCELLED], ids=["done", "retry", "cancel"])
def test_two_jobs_of_one_id_in_two_queues_are_two_jobs(a: Connection, verdict: Verdict) -> None:
    """The key is (id, queue), and whoever inserts may choose: even the tokens are equal."""
    for queue in "mail", "default":
        put(a, id=7, queue=queue)
    other = take_one(a, "A", queue="mail")
    lease = take_one(a, "A")
    assert lease == other._replace(queue="default")

    def untouched() -> Row:
        found = a.execute(text("SELECT xmin::text, * FROM background_jobs WHERE queue = 'mail'")).mappings()
        return dict(found.one())

    before = untouched()

    assert prolong(a, TABLES, [lease], lease=LEASE).kept == [lease]
    assert untouched() == before
    assert written(a, (lease, verdict)).written == [(lease, verdict)]
    assert untouched() == before
    assert release_unknown(a, TABLES, queue="default", owner="A", known=[]) == 0
    assert cancel_expired(a, TABLES, queue="default", retention=KEEP).cancelled == []
    assert untouched() == before


def test_a_rescue_takes_only_the_job_of_its_queue_when_another_has_its_id(a: Connection) -> None:
    for queue in "mail", "default":
        put(a, id=7, queue=queue)
    take_one(a, "A", queue="mail")
    expire(a, take_one(a, "A"))  # both, by their id
    run(a, "UPDATE background_jobs SET cancel_requested_at = clock_timestamp()")

    assert [lease.queue for lease, _ in rescue(a)] == ["default"]

    assert ask(a, "SELECT status FROM background_jobs") == "running"
    assert [row["queue"] for row in archive(a)] == ["default"]


def test_a_claim_takes_only_the_job_of_its_queue_when_another_has_its_id(a: Connection) -> None:
    for queue in "mail", "default":
        put(a, id=7, queue=queue)

    assert take_one(a, "A").queue == "default"

    assert a.execute(text("SELECT queue, status FROM background_jobs ORDER BY 1")).all() == [
        ("default", "running"),
        ("mail", "ready"),
    ]


@every_verdict
def test_a_job_that_somebody_set_back_by_hand_is_not_settled(a: Connection, verdict: Verdict) -> None:
    put(a)
    lease = take_one(a, "A")
    run(a, "UPDATE background_jobs SET status = 'ready'")  # and forgot the lease, as people do
    before = everything(a)

    settled = written(a, (lease, verdict))

    assert settled.busy == []  # or it would be tried again for ever
    assert everything(a) == before
    assert prolong(a, TABLES, [lease], lease=LEASE).lost == [lease]
    assert everything(a) == before


def test_one_stale_entry_does_not_keep_its_neighbours_from_being_written(a: Connection) -> None:
    put(a)
    put(a)
    put(a)
    leases = [take_one(a, "A") for _ in range(3)]
    expire(a, leases[1])
    rescue(a)
    take_one(a, "B")

    for verdict in DONE, FAILED:
        settled = written(a, *[(lease, verdict) for lease in leases])

        assert (leases[1], verdict) in settled.stale
        assert len(settled.stale) == 1

    assert [row["id"] for row in archive(a)] == [leases[0].id, leases[2].id]


# -- field case B23: the second attempt in each of its states, the first one tries everything


@pytest.mark.parametrize(
    "outcome",
    [None, DONE, RETRY, FAILED, CANCELLED],
    ids=["running", "done", "ready for a retry", "failed", "cancelled"],
)
def test_whatever_the_second_attempt_came_to_the_first_changes_nothing(
    a: Connection, b: Connection, outcome: Verdict | None
) -> None:
    put(a)
    first = take_one(a, "A")
    expire(a, first)
    rescue(b)
    second = take_one(b, "B")
    if outcome is not None:
        assert written(b, (second, outcome)).written
    before = everything(b)

    prolonged = prolong(a, TABLES, [first], lease=LEASE)
    acked = written(a, (first, DONE))
    failed = written(a, (first, RETRY))

    assert prolonged.lost == [first]
    assert acked.stale == [(first, DONE)]
    assert failed.stale == [(first, RETRY)]
    assert everything(b) == before


@pytest.mark.parametrize("verdict", [DONE, RETRY], ids=["done", "mixed"])
@pytest.mark.parametrize(
    "outcome", [DONE, RETRY, FAILED, CANCELLED], ids=["done", "retry", "failed", "cancelled"]
)
def test_what_the_second_attempt_of_a_worker_came_to_is_not_taken_for_its_first(
    a: Connection, outcome: Verdict, verdict: Verdict
) -> None:
    put(a)
    first = take_one(a, "A")
    expire(a, first)
    rescue(a)
    assert written(a, (take_one(a, "A"), outcome)).written

    assert written(a, (first, verdict), answer_lost=True).stale == [(first, verdict)]


# -- prolonging


def test_a_stale_worker_cannot_prolong_a_reclaimed_job(a: Connection, b: Connection) -> None:
    job = put(a)
    lost = take_one(a, "A")
    expire(a, lost)
    rescue(b)
    take_one(b, "B")
    before = alive(b, job)

    prolonged = prolong(a, TABLES, [lost], lease=LEASE)

    assert prolonged.lost == [lost]
    assert not prolonged.kept
    assert alive(b, job) == before


def test_an_expired_attempt_cannot_prolong_the_second_of_the_same_worker(a: Connection) -> None:
    job = put(a)
    first = take_one(a, "A")
    expire(a, first)
    rescue(a)
    take_one(a, "A")
    before = alive(a, job)

    assert prolong(a, TABLES, [first], lease=LEASE).lost == [first]
    assert alive(a, job) == before


def test_after_a_restore_only_the_owner_prolongs(a: Connection) -> None:
    job = put(a)
    held = take_one(a, "B")
    before = alive(a, job)

    assert prolong(a, TABLES, [held._replace(owner="A")], lease=LEASE).lost == [held._replace(owner="A")]
    assert alive(a, job) == before


# -- rescue against the owner


@every_verdict
def test_a_rescue_loses_against_a_settle_that_came_in_between(
    a: Connection, b: Connection, verdict: Verdict
) -> None:
    put(a)
    lease = take_one(a, "A")
    expire(a, lease)
    found = candidates(b)
    assert [each for each, _ in found] == [lease]
    assert written(a, (lease, verdict)).written
    before = everything(b)

    rescued = settle_expired(b, TABLES, found, retention=KEEP).written

    assert rescued == []
    assert everything(b) == before


def test_a_rescue_loses_against_a_lease_prolonged_in_between(a: Connection, b: Connection) -> None:
    put(a)
    lease = take_one(a, "A")
    expire(a, lease)
    found = candidates(b)
    assert prolong(a, TABLES, [lease], lease=LEASE).kept == [lease]
    before = everything(b)

    rescued = settle_expired(b, TABLES, found, retention=KEEP).written

    assert len(found) == 1
    assert rescued == []
    assert everything(b) == before


def test_a_slow_rescuer_does_not_end_an_attempt_that_began_after_its_look(
    a: Connection, b: Connection
) -> None:
    put(a)
    expire(a, take_one(a, "A"))
    found = candidates(b)
    rescue(a)
    expire(a, take_one(a, "A"))  # the second attempt has run out too, and yet it is not the one seen
    before = everything(b)

    rescued = settle_expired(b, TABLES, found, retention=KEEP).written

    assert rescued == []
    assert everything(b) == before


def test_after_a_restore_a_rescuer_ends_only_the_attempt_of_the_owner_it_saw(a: Connection) -> None:
    put(a)
    expire(a, take_one(a, "A"))
    found = candidates(a)
    run(a, "UPDATE background_jobs SET locked_by = 'B'")  # the same token, given out once more
    before = everything(a)

    assert settle_expired(a, TABLES, found, retention=KEEP).written == []
    assert everything(a) == before


def test_a_rescuer_leaves_a_job_that_somebody_set_back_by_hand(a: Connection) -> None:
    put(a)
    expire(a, take_one(a, "A"))
    found = candidates(a)
    run(a, "UPDATE background_jobs SET status = 'ready'")
    before = everything(a)

    assert settle_expired(a, TABLES, found, retention=KEEP).written == []
    assert everything(a) == before


def test_a_rescuer_ends_nothing_in_another_queue(a: Connection) -> None:
    put(a, queue="mail")
    lease = take_one(a, "A", queue="mail")
    expire(a, lease)
    before = everything(a)

    lost = (lease._replace(queue="default"), judged(Lost("A", timedelta(0))))

    assert settle_expired(a, TABLES, [lost], retention=KEEP).written == []
    assert everything(a) == before


def test_a_job_whose_lease_has_not_ended_is_no_candidate(a: Connection) -> None:
    put(a)
    put(a)
    expired, _ = take_one(a, "A"), take_one(a, "A")
    expire(a, expired)

    assert [lease for lease, _ in candidates(a)] == [expired]


def test_a_job_that_somebody_set_back_by_hand_is_no_candidate(a: Connection) -> None:
    put(a)
    expire(a, take_one(a, "A"))
    run(a, "UPDATE background_jobs SET status = 'ready'")

    assert candidates(a) == []


def test_of_two_rescuers_that_saw_the_same_lease_one_wins(a: Connection, b: Connection) -> None:
    job = put(a)
    expire(a, take_one(a, "A"))
    first, second = candidates(a), candidates(b)

    assert settle_expired(a, TABLES, first, retention=KEEP).written == first
    before = alive(b, job)
    assert settle_expired(b, TABLES, second, retention=KEEP).written == []
    assert alive(b, job) == before


def test_a_late_worker_whose_job_nobody_took_over_still_settles(a: Connection) -> None:
    put(a)
    lease = take_one(a, "A")
    expire(a, lease)

    assert written(a, (lease, DONE)).written == [(lease, DONE)]


# -- rescue and settle at the same moment: one of both transactions is still open


def test_while_a_rescue_is_open_the_settle_is_busy_and_after_its_commit_stale(
    clean: Engine, a: Connection
) -> None:
    put(a)
    lease = take_one(a, "A")
    expire(a, lease)
    with clean.connect() as rescuer, rescuer.begin() as open_rescue:
        assert rescue(rescuer)

        during = written(a, (lease, DONE))
        open_rescue.commit()

    after = written(a, (lease, DONE))
    assert during.busy == [(lease, DONE)]
    assert after.stale == [(lease, DONE)]
    assert archive(a) == []


def test_while_a_settle_is_open_the_rescue_takes_nothing(clean: Engine, a: Connection) -> None:
    job = put(a)
    lease = take_one(a, "A")
    expire(a, lease)
    with clean.begin() as handler:
        assert settle_within(handler, TABLES, (lease, DONE), retention=KEEP)

        assert rescue(a) == []

    assert rescue(a) == []
    assert live(a, job) is None
    assert [row["status"] for row in archive(a)] == ["done"]


@pytest.mark.parametrize("verdict", [DONE, RETRY], ids=["done", "mixed"])
def test_a_handlers_commit_that_waits_for_a_rescue_finds_its_lease_lost(
    clean: Engine, a: Connection, b: Connection, verdict: Verdict
) -> None:
    """Interleaving 24: the rescue takes over while the handler's transaction is open."""
    job = put(a)
    lease = take_one(a, "A")
    expire(a, lease)
    with clean.connect() as handler, clean.connect() as rescuer:
        run(handler, "INSERT INTO orders (customer) VALUES ('Ada')")
        assert rescue(rescuer)
        waiting, holding = backend(handler), backend(rescuer)

        with meanwhile(lambda: settle_within(handler, TABLES, (lease, verdict), retention=KEEP)) as won:
            until_blocked(b, waiting, by=holding)
            rescuer.commit()
        handler.rollback()

    assert won.result() is None
    assert alive(a, job)["status"] == "ready"
    assert archive(a) == []
    assert ask(a, "SELECT count(*) FROM orders") == 0


# -- in the handler's transaction


@every_verdict
def test_a_handlers_transaction_with_a_lost_lease_is_told_so(
    clean: Engine, a: Connection, verdict: Verdict
) -> None:
    put(a)
    lost = take_one(a, "A")
    expire(a, lost)
    rescue(a)
    take_one(a, "B")
    before = everything(a)

    with clean.connect() as handler:
        run(handler, "INSERT INTO orders (customer) VALUES ('Ada')")
        won = settle_within(handler, TABLES, (lost, verdict), retention=KEEP)
        handler.rollback()

    assert won is None
    assert everything(a) == before
    assert ask(a, "SELECT count(*) FROM orders") == 0


@pytest.mark.parametrize(
    "change", [{"token": 7}, {"owner": "B"}, {"queue": "mail"}], ids=["token", "owner", "queue"]
)
def test_a_handlers_transaction_proves_all_of_its_lease(
    clean: Engine, a: Connection, change: dict[str, object]
) -> None:
    put(a)
    lease = take_one(a, "A")
    before = everything(a)

    with clean.begin() as handler:
        won = settle_within(handler, TABLES, (lease._replace(**change), DONE), retention=KEEP)  # type: ignore[arg-type]

    assert won is None
    assert everything(a) == before


@every_verdict
def test_what_a_handler_wrote_and_its_jobs_end_are_one_transaction(
    clean: Engine, a: Connection, verdict: Verdict
) -> None:
    job = put(a)
    lease = take_one(a, "A")

    with clean.connect() as handler:
        run(handler, "INSERT INTO orders (customer) VALUES ('Ada')")
        won = settle_within(handler, TABLES, (lease, verdict), retention=KEEP)
        seen_outside = alive(a, job)["status"], ask(a, "SELECT count(*) FROM orders")
        handler.commit()

    assert won is not None
    assert seen_outside == ("running", 0)
    assert statuses(a) == {job: verdict.status}
    assert ask(a, "SELECT count(*) FROM orders") == 1


# -- an answer lost on the wire is not a lost lease


@every_verdict
def test_an_outcome_sent_twice_is_written_once_and_not_stale(a: Connection, verdict: Verdict) -> None:
    put(a)
    lease = take_one(a, "A")
    assert written(a, (lease, verdict)).written
    before = everything(a)

    again = written(a, (lease, verdict), answer_lost=True)

    assert again.written == [(lease, verdict)]
    assert not again.stale
    assert everything(a) == before


@every_verdict
def test_a_lost_answer_is_looked_for_past_the_line_of_an_earlier_attempt_that_was_lost(
    a: Connection, b: Connection, verdict: Verdict
) -> None:
    put(a)
    expire(a, take_one(a, "A"))
    rescue(b)  # the attempt log now says so
    lease = take_one(b, "B")
    assert written(b, (lease, verdict)).written

    again = written(b, (lease, verdict), answer_lost=True)

    assert again.written == [(lease, verdict)]
    assert not again.stale


@every_verdict
def test_what_the_log_says_of_an_earlier_attempt_is_not_taken_for_this_one(
    a: Connection, verdict: Verdict
) -> None:
    put(a)
    assert written(a, (take_one(a, "B"), judged(Raised("boom", timedelta(0))))).written
    lease = take_one(a, "A")
    assert written(a, (lease, verdict)).written

    assert written(a, (lease, verdict), answer_lost=True).written == [(lease, verdict)]


@every_verdict
def test_an_outcome_of_ours_that_is_there_already_is_told_as_it_is(a: Connection, verdict: Verdict) -> None:
    """A handler's own commit went through, its answer did not: what comes after it is not what happened."""
    put(a)
    lease = take_one(a, "A")
    assert written(a, (lease, DONE)).written
    before = everything(a)

    [(told, outcome)] = written(a, (lease, verdict), answer_lost=True).written

    assert (told, outcome.status) == (lease, JobStatus.DONE)
    assert everything(a) == before


@every_verdict
def test_after_a_rescue_that_set_the_job_ready_the_outcome_is_stale(a: Connection, verdict: Verdict) -> None:
    put(a)
    lease = take_one(a, "A")
    expire(a, lease)
    rescue(a)

    assert written(a, (lease, verdict), answer_lost=True).stale == [(lease, verdict)]


@every_verdict
def test_after_a_rescue_that_failed_the_job_the_outcome_is_stale(a: Connection, verdict: Verdict) -> None:
    job = put(a, max_attempts=1)
    lease = take_one(a, "A")
    expire(a, lease)
    rescue(a)

    settled = written(a, (lease, verdict), answer_lost=True)

    assert alive(a, job)["status"] == "failed"
    assert settled.stale == [(lease, verdict)]


@every_verdict
def test_after_a_rescue_that_cancelled_the_job_the_outcome_is_stale(a: Connection, verdict: Verdict) -> None:
    put(a)
    lease = take_one(a, "A")
    run(a, "UPDATE background_jobs SET cancel_requested_at = clock_timestamp()")
    expire(a, lease)
    rescue(a)

    settled = written(a, (lease, verdict), answer_lost=True)

    assert [row["status"] for row in archive(a)] == ["cancelled"]
    assert settled.stale == [(lease, verdict)]


@pytest.mark.parametrize("theirs", [DONE, CANCELLED, FAILED], ids=["done", "cancelled", "failed"])
def test_after_a_restore_what_another_owner_ended_under_our_token_is_not_ours(
    a: Connection, theirs: Verdict
) -> None:
    put(a)
    ours = take_one(a, "B")._replace(owner="A")
    assert written(a, (ours._replace(owner="B"), theirs)).written

    assert written(a, (ours, DONE), answer_lost=True).stale == [(ours, DONE)]


def test_a_retry_written_by_us_and_claimed_again_is_out_of_reach(a: Connection, b: Connection) -> None:
    put(a)
    lease = take_one(a, "A")
    retry = judged(Raised("boom", timedelta(0)))
    assert written(a, (lease, retry)).written
    take_one(b, "B")
    before = everything(b)

    again = written(a, (lease, retry), answer_lost=True)

    assert not again.written
    assert everything(b) == before


@pytest.mark.parametrize("verdict", [DONE, judged(Returned("7"))], ids=["done", "mixed"])
@pytest.mark.parametrize("answer_lost", [True, False])
def test_a_job_that_retention_deleted_at_once_counts_as_written_only_if_an_answer_was_lost(
    a: Connection, verdict: Verdict, answer_lost: bool
) -> None:
    at_once = Retention(done=timedelta(0))
    job = put(a)
    lease = take_one(a, "A")
    assert written(a, (lease, verdict), retention=at_once).written

    again = written(a, (lease, verdict), retention=at_once, answer_lost=answer_lost)

    assert live(a, job) is None
    assert archive(a) == []
    assert (again.written, again.stale) == (
        ([(lease, verdict)], []) if answer_lost else ([], [(lease, verdict)])
    )
