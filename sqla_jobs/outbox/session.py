"""Calls wait in the caller's session and become rows in its flush.

`put` and its sisters only touch the session object, so they are the same plain call for every kind of
session. A placeholder in the session makes it flush; the listeners below (on the class Session,
registered once) take it out again and write all jobs of the flush by Core, in call order: before the
flush when all arguments are known, after it when an entity gets its identity there. A flush that fails
before it wrote them keeps them: no commit passes without its jobs. ORM events of the Job class do not
fire for these rows.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, CursorResult, Insert, event, inspect
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import (
    Mapper,
    Session,
    SessionTransaction,
    UOWTransaction,
    object_session,
    scoped_session,
)
from sqlalchemy.sql.expression import SelectBase

from sqla_jobs.core.call import Call, Options
from sqla_jobs.core.payload import Json, Parameters, Reference
from sqla_jobs.errors import ConfigurationError, SqlaJobsError
from sqla_jobs.models import JobMixin, tables_of
from sqla_jobs.outbox.entities import identity_of, is_pending, stored
from sqla_jobs.outbox.handles import Enqueued, EnqueuedSelect
from sqla_jobs.outbox.rows import WITHOUT_WAKE_UP, connection_of, select_statement, write_rows
from sqla_jobs.outbox.selects import arguments_of

__all__ = ["AnySession", "put", "put_many", "put_select"]

AnySession = Session | AsyncSession | scoped_session[Any] | async_scoped_session[Any]

_PUTS = "sqla_jobs.puts"  # in session.info: what is not written yet, in its order
_PUT = "_sqla_jobs_put"  # on the placeholder
_FLUSHED = "_sqla_jobs_flushed"  # on the session: the rows of the flush under way are written


@dataclass(slots=True, eq=False)
class _Put:
    """Calls that came together, or a select, on their way into the database.

    It is wanted as long as its placeholder is in the session; while it has none, between the two events
    of a flush, as long as the transaction or savepoint in which it was made goes on.
    """

    model: type[JobMixin]
    calls: Sequence[tuple[Call, Enqueued]] = ()
    select: tuple[Insert, EnqueuedSelect] | None = None
    transaction: SessionTransaction | None = None
    placeholder: JobMixin | None = None
    put_off: bool = False  # a select that waited for what its flush writes

    def references(self) -> Iterable[Reference]:
        """The entities among the arguments."""
        for call, _ in self.calls:
            yield from call.arguments.references


def put(session: AnySession, call: Call) -> Enqueued:
    """Let `call` become a job when, and only when, the session's transaction commits.

    Raises `ConfigurationError` when `session` is not a session. Sends nothing to the database, unless
    the session is flushing at this moment: a row is then written at once.
    """
    handle = Enqueued(call.kind, call.options.queue)
    _take(_plain(session), _Put(call.model, [(call, handle)]))
    return handle


def put_many(session: AnySession, calls: Sequence[Call]) -> list[Enqueued]:
    """The same for many calls, which cost the session one object for each Job class among them."""
    plain = _plain(session)
    pairs = [(call, Enqueued(call.kind, call.options.queue)) for call in calls]
    by_model: dict[type[JobMixin], list[tuple[Call, Enqueued]]] = {}
    for pair in pairs:
        by_model.setdefault(pair[0].model, []).append(pair)
    for model, some in by_model.items():
        _take(plain, _Put(model, some))
    return [handle for _, handle in pairs]


def put_select(
    session: AnySession,
    kind: str,
    options: Options,
    model: type[JobMixin],
    statement: SelectBase,
    parameters: Parameters | None,
) -> EnqueuedSelect:
    """Let every row of `statement` become a job, in the session's next flush, after everything else in it."""
    plain = _plain(session)
    source, payload = arguments_of(kind, statement, parameters)
    jobs = tables_of(model).jobs
    handle = EnqueuedSelect(kind, options.queue)
    insert = select_statement(inspect(model), jobs, kind, options, source, payload)
    _take(plain, _Put(model, select=(insert, handle)))
    return handle


def _plain(session: object) -> Session:
    """The Session inside whatever the caller holds."""
    if isinstance(session, (scoped_session, async_scoped_session)):
        session = session.registry()
    if isinstance(session, AsyncSession):
        session = session.sync_session
    if not isinstance(session, Session):
        raise ConfigurationError(
            f"enqueue needs a SQLAlchemy session (Session, AsyncSession, or a scoped one) as its first "
            f"argument, got {type(session).__name__}"
        )
    return session


def _take(session: Session, it: _Put) -> None:
    # _flushing: an own flag raised in before_flush would never be lowered when a flush fails
    if session._flushing:
        _during_flush(session, it)
    else:
        _hold(session, it)


def _hold(session: Session, it: _Put) -> None:
    """Keep it in the session, which is not clean any more; what drops the session's objects drops it."""
    if it.placeholder is None:
        mapper: Mapper[Any] = inspect(it.model)
        # never Job(...): a user's __init__ may want arguments, a dataclass base forbids ours
        mapper.registry.configure()
        it.placeholder = mapper.class_manager.new_instance()
        it.placeholder.__dict__[_PUT] = it
    session.add(it.placeholder)
    it.transaction = _transaction(session)
    puts: list[_Put] = session.info.setdefault(_PUTS, [])
    if puts and not _goes_on(puts[0]):  # a session that only rolls back would keep them all
        puts[:] = [each for each in puts if _wanted(session, each)]
    puts.append(it)


def _during_flush(session: Session, it: _Put) -> None:
    """A call from a user's own flush listener: written at once, or with those that wait already."""
    puts: list[_Put] = session.info.get(_PUTS, [])
    # a select sees what this flush writes: now, if that is done, or there is nothing (and no second event)
    parked = it.select is not None and _FLUSHED not in session.__dict__ and _has_work(session)
    if puts or parked or _waits(session, it):
        it.transaction = _transaction(session)
        puts.append(it)
        session.info[_PUTS] = puts
    else:
        _write(session, [it])


def _transaction(session: Session) -> SessionTransaction | None:
    return session.get_nested_transaction() or session.get_transaction()


def _goes_on(it: _Put) -> bool:
    return it.transaction is not None and it.transaction.is_active


def _wanted(session: Session, it: _Put) -> bool:
    # a rolled-back savepoint, expunge and close take placeholders away
    return _goes_on(it) if it.placeholder is None else it.placeholder in session


def _waits(session: Session, it: _Put) -> bool:
    return any(identity_of(session, reference) is None for reference in it.references())


@event.listens_for(Session, "before_flush")
def _before_flush(session: Session, context: UOWTransaction, instances: object) -> None:
    session.__dict__.pop(_FLUSHED, None)
    puts: list[_Put] | None = session.info.get(_PUTS)
    if not puts:
        return
    puts[:] = [it for it in puts if _wanted(session, it)]
    # What raises up to the expunge leaves all as it is: the next flush, the one of commit included, meets
    # it again. Emptied first, a refused argument would lose every other job of the flush.
    pending = [True for it in puts for reference in it.references() if is_pending(session, reference)]
    later = bool(pending) or _selects_wait(session, puts)
    if not later:
        _write(session, puts)
    for it in puts:
        if it.placeholder is not None:
            session.expunge(it.placeholder)
            it.placeholder = None
    if not later:
        del session.info[_PUTS]


def _selects_wait(session: Session, puts: Sequence[_Put]) -> bool:
    """Whether a select is to see what this flush writes. Once: a flush without work has no second event."""
    selects = [it for it in puts if it.select is not None]
    if not selects or any(it.put_off for it in selects):
        return False
    if not _has_work(session):
        return False
    for it in selects:
        it.put_off = True
    return True


def _has_work(session: Session) -> bool:
    """Whether a flush writes anything but ours. By attribute, since an entity need not be hashable."""
    return (
        any(_PUT not in each.__dict__ for each in session.new)
        or bool(session.deleted)
        or any(session.is_modified(each) for each in session.dirty)
    )


@event.listens_for(Session, "after_flush")
def _after_flush(session: Session, context: UOWTransaction) -> None:
    session.__dict__[_FLUSHED] = True
    puts: list[_Put] | None = session.info.pop(_PUTS, None)
    if not puts:
        return
    # an entity that another after_flush listener added gets its identity in the next flush
    waiting = {it for it in puts if _waits(session, it)}
    if waiting:
        session.info[_PUTS] = [it for it in puts if it in waiting]
    _write(session, [it for it in puts if it not in waiting])


@event.listens_for(Session, "before_commit")
def _before_commit(session: Session) -> None:
    """Calls whose flush ended before its second event (a listener raised, no work was left) get another."""
    puts: list[_Put] = session.info.pop(_PUTS, [])
    for it in puts:
        if _wanted(session, it):
            _hold(session, it)


@event.listens_for(JobMixin, "before_insert", propagate=True)
def _never_half_resolved(mapper: Mapper[Any], connection: Connection, target: JobMixin) -> None:
    session = object_session(target)
    if session is not None and session.twophase:
        connection.execute(WITHOUT_WAKE_UP)
    if _PUT in target.__dict__:
        raise SqlaJobsError(
            "a job that was enqueued is about to be written without its arguments; this happens when a "
            "flush listener adds it back to the session: leave it alone"
        )


def _write(session: Session, puts: Sequence[_Put]) -> None:
    """Calls in their order, those of one model together; selects after them."""
    identities = _identities(session)
    by_model: dict[type[JobMixin], list[tuple[Call, Enqueued, Callable[[Reference], Json]]]] = {}
    for it in puts:
        if it.calls:
            rows = by_model.setdefault(it.model, [])
            rows += [(call.keyed(), handle, identities) for call, handle in it.calls]
    for model, rows in by_model.items():
        write_rows(session, model, rows)
    for it in puts:
        if it.select is not None:
            statement, handle = it.select
            result: CursorResult[Any] = connection_of(session, it.model).execute(statement)
            handle._count = result.rowcount


def _identities(session: Session) -> Callable[[Reference], Json]:
    def resolve(reference: Reference) -> Json:
        identity = identity_of(session, reference)
        assert identity is not None  # else the call would still wait
        return stored(reference, identity)

    return resolve
