"""Write the outcomes of attempts, each fenced by its lease.

One statement settles many jobs of one queue: rows still ours move to the archive or back to ready, rows
that are no longer ours are left alone and reported. Does not decide anything: verdicts come from
core.lifecycle. Called with a held connection in AUTOCOMMIT, or with a handler's own transaction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Connection,
    Double,
    Executable,
    Integer,
    Select,
    Table,
    TableValuedAlias,
    Text,
    and_,
    case,
    cast,
    delete,
    func,
    literal_column,
    null,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB

from sqla_jobs.core.leases import Lease
from sqla_jobs.core.lifecycle import JobStatus, Verdict
from sqla_jobs.core.retention import Retention
from sqla_jobs.errors import SqlaJobsError
from sqla_jobs.models import Tables
from sqla_jobs.store.answers import UNCHANGED, Answer, answer_of, told
from sqla_jobs.store.door import brief, is_retryable, may_blame_a_row
from sqla_jobs.store.halves import by_halves
from sqla_jobs.store.parts import (
    CLOCK,
    IDS,
    OWNER,
    QUEUE,
    RELATION,
    STATEMENT_TIME,
    announced,
    archived,
    leases_given,
    status,
    unnested,
)

__all__ = ["Entry", "Settled", "settle", "settle_expired", "settle_within"]

READY, RUNNING = status(JobStatus.READY), status(JobStatus.RUNNING)
DONE, FAILED, CANCELLED = status(JobStatus.DONE), status(JobStatus.FAILED), status(JobStatus.CANCELLED)

#: The attempt log remembers so many failures, each with so many characters of its error.
LOG_LENGTH = 10
LOG_ERROR_LENGTH = 500

Entry = tuple[Lease, Verdict]

# plain text: the end of the transaction ends it too, and no object of SQLAlchemy's must be told
_SAVEPOINT, _BACK_TO_IT = text("SAVEPOINT sqla_jobs"), text("ROLLBACK TO SAVEPOINT sqla_jobs")
#: A deferred foreign key to the job would be looked at by the COMMIT, when there is no way back.
_CHECK_NOW = text("SET CONSTRAINTS ALL IMMEDIATE")


@dataclass(slots=True)
class Settled:
    """What became of the verdicts.

    Written (by this call, or by an earlier one whose answer was lost), still to be written because
    somebody holds the row, too late, or refused by the database as data.
    """

    written: list[Entry] = field(default_factory=list)
    busy: list[Entry] = field(default_factory=list)
    stale: list[Entry] = field(default_factory=list)
    refused: list[tuple[Entry, str]] = field(default_factory=list)
    kept: list[tuple[Entry, str]] = field(default_factory=list)  # written, but not archived, and why

    def add(self, other: "Settled") -> "Settled":
        """The union of both."""
        self.written += other.written
        self.busy += other.busy
        self.stale += other.stale
        self.refused += other.refused
        self.kept += other.kept
        return self


def _fence(jobs: Table, outcome: TableValuedAlias, *, expired: bool) -> Any:
    """Whose row it must be: guarantee 3 hangs on these lines.

    Our own: queue, id, token and owner are the lease's. Of another worker: the same, and its lease has
    run out. The token alone would do but for a restore to a point in time, which takes tokens back.
    """
    own = and_(
        jobs.c.queue == QUEUE,
        jobs.c.status == RUNNING,
        jobs.c.id == outcome.c.id,
        jobs.c.fencing_token == outcome.c.token,
    )
    if expired:
        return and_(own, jobs.c.locked_by == outcome.c.owner, jobs.c.locked_until < STATEMENT_TIME)
    return and_(own, jobs.c.locked_by == OWNER)


@cache
def done_statement(tables: Tables, *, wait: bool) -> Executable:
    """The common case: every attempt returned, nothing is stored of it. Half the arrays of the other."""
    jobs = tables.jobs
    outcome = leases_given()
    # in id order, so that two batch writers never deadlock; SKIP LOCKED, so that one row that somebody
    # holds open in psql does not keep the whole batch until its leases are gone
    held = (
        select(jobs.c.id)
        .where(_fence(jobs, outcome, expired=False))
        .order_by(jobs.c.id)
        .with_for_update(of=jobs, skip_locked=not wait)
        .cte("held")
        .prefix_with("MATERIALIZED")
    )
    gone = (
        delete(jobs)
        .where(jobs.c.queue == QUEUE, jobs.c.id.in_(select(held.c.id)))
        .returning(
            *jobs.c,
            DONE.label("final"),
            cast(null(), Text).label("reason"),
            cast(null(), JSONB).label("outcome_result"),
        )
        .cte("gone")
    )
    return select(*told(held, select(gone.c.id))).add_cte(archived(tables, gone).cte("moved"))


@cache
def mixed_statement(tables: Tables, *, expired: bool, wait: bool, in_place: bool = False) -> Executable:
    """Any verdicts: final ones move to the archive, the rest is updated in place.

    `in_place` is for a row that cannot leave the jobs table (a user's foreign key points at it, say):
    it stays there as done or cancelled, for settling must never fail for want of the archive.
    """
    jobs = tables.jobs
    outcome = unnested(
        ("id", BigInteger, "ids"),
        ("token", BigInteger, "tokens"),
        ("status", Text, "statuses"),
        ("attempts", Integer, "given_back"),
        ("delay", Double, "delays"),
        ("error", Text, "errors"),
        ("result", Text, "results"),
        ("owner", Text, "owners"),
    )
    # a cancel requested meanwhile turns every end but a normal return into a cancel
    final = case(
        (and_(jobs.c.cancel_requested_at.is_not(None), outcome.c.status != DONE), CANCELLED),
        else_=outcome.c.status,
    )
    held = (
        select(
            jobs.c.id,
            final.label("final"),
            outcome.c.attempts.label("given_back"),
            outcome.c.delay,
            outcome.c.error,
            # a handler's own Cancel is a decision, not a failure
            case((outcome.c.status != CANCELLED, outcome.c.error), else_=null()).label("failure"),
            cast(outcome.c.result, JSONB).label("outcome_result"),
        )
        .where(_fence(jobs, outcome, expired=expired))
        .order_by(jobs.c.id)
        .with_for_update(of=jobs, skip_locked=not wait)
        .cte("held")
        .prefix_with("MATERIALIZED")
    )
    archives: Any = or_(held.c.final == DONE, held.c.final == CANCELLED)
    if in_place:
        archives = literal_column("false", Boolean)
    # a rescue that ends in a cancel says so in the log too: `_ended_by_us` relies on it
    log = _logged(jobs, held, lost=expired)
    kept = [column for column in jobs.c if column.name != "attempt_log"]
    gone = (
        delete(jobs)
        .where(jobs.c.queue == QUEUE, jobs.c.id == held.c.id, archives)
        .returning(
            *kept,
            log.label("attempt_log"),
            held.c.final,
            held.c.error.label("reason"),
            held.c.outcome_result,
        )
        .cte("gone")
    )
    moved = archived(tables, gone).cte("moved")
    stayed = _stayed(jobs, held, archives, log=log)
    written = select(gone.c.id).union_all(select(stayed.c.id))
    return select(*told(held, written), announced(stayed)).add_cte(moved)


def _logged(jobs: Table, held: Any, *, lost: bool) -> Any:
    """The attempt log, with a line for this end if it is a failure."""
    c = jobs.c
    entry = func.jsonb_build_object(
        literal_column("'attempt'"), c.attempts,
        literal_column("'token'"), c.fencing_token,
        literal_column("'at'"), CLOCK,
        literal_column("'worker'"), c.locked_by,
        literal_column("'lost'"), literal_column("true" if lost else "false"),
        literal_column("'error'"), func.left(held.c.failure, literal_column(str(LOG_ERROR_LENGTH))),
    )  # fmt: skip
    # whatever a user wrote there (JSON null, say) must not keep the job from its end
    usable = func.jsonb_typeof(c.attempt_log) == literal_column("'array'")
    log = case((usable, c.attempt_log), else_=literal_column("'[]'::jsonb", JSONB))
    full = func.jsonb_array_length(log) >= literal_column(str(LOG_LENGTH))
    trimmed = case((full, log.op("-")(literal_column("0"))), else_=log)
    return case((held.c.failure.is_(None), c.attempt_log), else_=trimmed.op("||")(entry))


def _stayed(jobs: Table, held: Any, archives: Any, *, log: Any) -> Any:
    """Ready again, failed for good and kept as a dead letter, or kept because the archive refused it."""
    c = jobs.c
    run_at = case((held.c.delay.is_(None), c.run_at), else_=CLOCK + _seconds(held.c.delay))
    return (
        update(jobs)
        .where(c.queue == QUEUE, c.id == held.c.id, ~archives)
        .values(
            status=held.c.final,
            # whoever sets attempts by hand must not keep the job from its end
            attempts=func.greatest(c.attempts + held.c.given_back, literal_column("0")),
            run_at=case((held.c.final == READY, run_at), else_=c.run_at),
            locked_by=None,
            locked_until=None,
            last_error=func.coalesce(held.c.error, c.last_error),
            attempt_log=log,
            finished_at=case((held.c.final != READY, CLOCK), else_=null()),
            result=func.coalesce(held.c.outcome_result, c.result),
        )
        .returning(RELATION, c.id, c.queue, c.priority, c.run_at, c.status)
        .cte("stayed")
    )


def _seconds(value: Any) -> Any:
    return value * literal_column("interval '1 second'")


@cache
def look_statement(tables: Tables) -> Executable:
    """Where the rows are now, and who ended the attempt last."""

    def of(table: Table, where: str) -> Select[*tuple[Any, ...]]:
        c = table.c
        return select(
            c.id, c.fencing_token, c.locked_by, c.status, c.attempt_log.op("->")(literal_column("-1")),
            literal_column(where).label("place"),
        ).where(c.queue == QUEUE, c.id == func.any(IDS))  # fmt: skip

    return of(tables.jobs, "'jobs'").union_all(of(tables.archive, "'archive'"))


def settle(
    connection: Connection,
    tables: Tables,
    entries: Sequence[Entry],
    *,
    retention: Retention,
    answer_lost: bool = False,
) -> Settled:
    """Write verdicts of one queue and one owner, all in one statement; for AUTOCOMMIT.

    What the statement did not find is looked for once: still ours (somebody holds the row: try again),
    written by an earlier call whose answer was lost, or stale. A value that the database refuses costs
    its own row only: the batch is halved until it is found. Raises what the connection raises.
    """
    if len({lease.id for lease, _ in entries}) < len(entries):  # two attempts of one job, both ours
        places = {lease.id: place for place, (lease, _) in reversed([*enumerate(entries)])}
        first = [entries[place] for place in places.values()]
        later = [each for place, each in enumerate(entries) if places[each[0].id] != place]
        options: dict[str, Any] = {"retention": retention, "answer_lost": answer_lost}
        return settle(connection, tables, first, **options).add(settle(connection, tables, later, **options))
    queue = entries[0][0].queue
    simple = all(_is_simple(verdict) for _, verdict in entries)
    statement = (
        done_statement(tables, wait=False) if simple else mixed_statement(tables, expired=False, wait=False)
    )
    settled = Settled()
    missing: list[Entry] = []
    write = partial(_write, connection, statement, retention, simple)
    written, refused = by_halves(write, entries)
    for part, answer in written:
        if len(answer.ids) == len(part):
            settled.written += part
            continue
        for entry in part:
            if entry[0].id in answer.ids:
                settled.written.append(entry)
            elif entry[0].id in answer.unchanged:
                refused.append((entry, UNCHANGED))
            else:
                missing.append(entry)
    for entry, error in refused:
        _settle_in_place(connection, tables, entry, error, settled, retention)
    if missing:
        settled.add(_look(connection, tables, missing, queue=queue, answer_lost=answer_lost))
    return settled


def _settle_in_place(
    connection: Connection,
    tables: Tables,
    entry: Entry,
    error: str,
    settled: Settled,
    retention: Retention,
    *,
    expired: bool = False,
) -> None:
    """What could not be archived stays in the jobs table; what cannot be written at all is refused.

    Tried for every verdict: a cancel request, known to the database alone, may have made it final.
    """
    statement = mixed_statement(tables, expired=expired, wait=False, in_place=True)
    try:  # it has been found already that it is this row
        answer = _write(connection, statement, retention, False, [entry])
    except Exception as refusal:
        if not may_blame_a_row(refusal):
            raise
        settled.refused.append((entry, brief(refusal)))
        return
    if answer.ids:
        settled.written.append(entry)
        settled.kept.append((entry, error))
    elif answer.unchanged:
        settled.refused.append((entry, UNCHANGED))
    else:
        settled.busy.append(entry)  # held or lost in this moment: the next try looks


def settle_within(
    connection: Connection,
    tables: Tables,
    entry: Entry,
    *,
    retention: Retention,
    check_now: bool = False,
) -> Settled | None:
    """Write one verdict as part of the caller's transaction; None when the lease is lost.

    Waits for its row instead of skipping it: the worker's own prolongation may hold it for a moment. In a
    savepoint: what cannot be archived ends in place, and costs nothing of what the caller wrote. Whoever
    calls sets a lock_timeout and rolls back on None. `check_now`: nobody goes on with the transaction, so its
    deferred constraints are looked at here. Raises what cannot be written at all.
    """
    simple = _is_simple(entry[1])
    statement = (
        done_statement(tables, wait=True) if simple else mixed_statement(tables, expired=False, wait=True)
    )
    connection.execute(_SAVEPOINT)
    try:
        answer = _write(connection, statement, retention, simple, [entry])
        if check_now:
            connection.execute(_CHECK_NOW)
        if not answer.unchanged:
            return Settled(written=[entry]) if answer.ids else None
        reason = UNCHANGED
    except Exception as error:
        if is_retryable(error):
            connection.execute(_BACK_TO_IT)  # the caller may try it once more
            raise
        if not may_blame_a_row(error):
            raise
        connection.execute(_BACK_TO_IT)
        reason = brief(error)
    else:
        connection.execute(_BACK_TO_IT)
    statement = mixed_statement(tables, expired=False, wait=True, in_place=True)
    answer = _write(connection, statement, retention, False, [entry])
    if check_now:
        connection.execute(_CHECK_NOW)  # what still fails here is the handler's own work
    if answer.unchanged:
        raise SqlaJobsError(f"job {entry[0].id} cannot be settled: {UNCHANGED}")
    return Settled(written=[entry], kept=[(entry, reason)]) if answer.ids else None


def settle_expired(
    connection: Connection, tables: Tables, entries: Sequence[Entry], *, retention: Retention
) -> Settled:
    """Write verdicts on leases of other workers that have run out; for AUTOCOMMIT.

    All entries are of one queue. A worker that settled in the last moment wins: what it wrote is neither
    written nor refused here. What cannot be archived ends in place, as in `settle`.
    """
    settled = Settled()
    statement = mixed_statement(tables, expired=True, wait=False)
    written, refused = by_halves(partial(_write, connection, statement, retention, False), entries)
    for part, answer in written:
        settled.written += [entry for entry in part if entry[0].id in answer.ids]
        refused += [(entry, UNCHANGED) for entry in part if entry[0].id in answer.unchanged]
    for entry, error in refused:
        _settle_in_place(connection, tables, entry, error, settled, retention, expired=True)
    return settled


def _is_simple(verdict: Verdict) -> bool:
    return verdict.status is JobStatus.DONE and verdict.result is None


def _write(
    connection: Connection,
    statement: Executable,
    retention: Retention,
    simple: bool,
    entries: Sequence[Entry],
) -> Answer:
    return answer_of(connection.execute(statement, _parameters(entries, retention, simple=simple)))


def _parameters(entries: Sequence[Entry], retention: Retention, *, simple: bool) -> dict[str, object]:
    first = entries[0][0]
    parameters: dict[str, object] = {
        "q": first.queue,
        "owner": first.owner,
        "ids": [lease.id for lease, _ in entries],
        "tokens": [lease.token for lease, _ in entries],
        "keep_done": retention.keeps_done,
        "keep_cancelled": retention.keeps_cancelled,
    }
    if simple:
        return parameters
    return parameters | {
        "statuses": [v.status.value for _, v in entries],
        "given_back": [v.attempts for _, v in entries],
        "delays": [_total_seconds(v.delay) for _, v in entries],
        "errors": [v.error for _, v in entries],
        "results": [v.result for _, v in entries],
        "owners": [lease.owner for lease, _ in entries],
    }


def _total_seconds(delay: timedelta | None) -> float | None:
    return None if delay is None else delay.total_seconds()


def _look(
    connection: Connection, tables: Tables, entries: Sequence[Entry], *, queue: str, answer_lost: bool
) -> Settled:
    """An answer lost on the wire is not a lost lease: look before saying so."""
    rows = connection.execute(
        look_statement(tables), {"q": queue, "ids": [lease.id for lease, _ in entries]}
    ).all()
    seen: dict[int, list[Any]] = {}
    for row in rows:
        seen.setdefault(row[0], []).append(row)
    settled = Settled()
    for entry in entries:
        places = seen.get(entry[0].id, [])
        if not places:
            # deleted: by an earlier call of ours under Retention(done=0), or by somebody else
            (settled.written if answer_lost else settled.stale).append(entry)
        elif any(_still_ours(row, entry[0]) for row in places):
            settled.busy.append(entry)
        elif ended := [row for row in places if _ended_by_us(row, entry[0])]:
            settled.written.append((entry[0], _as_written(entry[1], JobStatus(ended[0][3]))))
        else:
            settled.stale.append(entry)
    return settled


def _as_written(verdict: Verdict, status: JobStatus) -> Verdict:
    """What an earlier call wrote counts: a handler's commit, say, whose lost answer looked like a failure."""
    return verdict if verdict.status is status else Verdict(status)


def _still_ours(row: Any, lease: Lease) -> bool:
    _, token, owner, state, _, place = row
    return bool(
        place == "jobs" and state == JobStatus.RUNNING and token == lease.token and owner == lease.owner
    )


def _ended_by_us(row: Any, lease: Lease) -> bool:
    """The attempt of this token has ended, by no other owner, and not by a rescue: the log says so."""
    _, token, owner, _, last, _ = row
    if token != lease.token:
        return False
    if not (isinstance(last, dict) and last.get("token") == token):
        last = {}
    # the archive remembers the owner; of a row that is ready or failed only the log does
    return not last.get("lost") and {owner, last.get("worker")} <= {lease.owner, None}
