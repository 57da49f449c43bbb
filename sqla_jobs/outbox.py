"""A call into the caller's transaction: the job exists if and only if that transaction commits.

`put` only touches the session object, so it is the same plain call for every kind of session. A
placeholder in the session makes it flush; the listeners below (on the class Session, registered once)
take it out again and write all jobs of the flush by Core, in call order, in one statement: before the
flush when all arguments are known, after it when an entity gets its identity there. A flush that fails
before it wrote them keeps them: no commit passes without its jobs. ORM events of the Job class do not
fire for these rows.
"""

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    ClauseElement,
    Connection,
    Executable,
    Integer,
    Interval,
    SmallInteger,
    Table,
    Text,
    bindparam,
    cast,
    column,
    event,
    func,
    insert,
    inspect,
    literal_column,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import (
    InstanceState,
    Mapper,
    Session,
    SessionTransaction,
    UOWTransaction,
    scoped_session,
)

from sqla_jobs.core.call import Call
from sqla_jobs.core.payload import Converter, Json, Load, Reference, converter
from sqla_jobs.errors import ConfigurationError, NotFlushed, PayloadError, SqlaJobsError
from sqla_jobs.models import JobMixin

__all__ = ["AnySession", "Enqueued", "entity_hook", "put"]

AnySession = Session | AsyncSession | scoped_session[Any] | async_scoped_session[Any]

_CALLS = "sqla_jobs.calls"  # in session.info: the calls not written yet, in their order
_CALL = "_sqla_jobs_call"  # on the placeholder


class Enqueued:
    """What became of an `enqueue`: readable after the flush, and after commit, on every kind of session.

    `created` is False when an equal unique key was there already; then `id` is that job's and `conflict`
    says whether it was "waiting" or "running". After a rollback the handle means nothing.

    Raises `NotFlushed` from `id` before the flush.
    """

    __slots__ = ("_id", "conflict", "created", "kind", "queue")

    def __init__(self, kind: str, queue: str) -> None:
        self._id: int | None = None
        self.kind = kind
        self.queue = queue
        self.created = True
        self.conflict: str | None = None

    @property
    def id(self) -> int:
        """The job's id: `jobs.find(session, handle.id)`."""
        if self._id is None:
            raise NotFlushed(
                f"the id of this {self.kind} job comes from PostgreSQL at flush: "
                "call session.flush(), or read it after commit"
            )
        return self._id

    def __repr__(self) -> str:
        return f"<Enqueued {self.kind} {'not flushed' if self._id is None else self._id}>"


@dataclass(slots=True, eq=False)
class _Put:
    """One call on its way into the database.

    It is wanted as long as its placeholder is in the session; while it has none, between the two events
    of a flush, as long as the transaction or savepoint in which it was made goes on.
    """

    model: type[JobMixin]
    call: Call
    handle: Enqueued
    transaction: SessionTransaction | None = None
    placeholder: JobMixin | None = None


def put(session: AnySession, model: type[JobMixin], call: Call) -> Enqueued:
    """Let `call` become a job when, and only when, the session's transaction commits.

    Raises `ConfigurationError` when `session` is not a session. Sends nothing to the database, unless
    the session is flushing at this moment: a row is then written at once.
    """
    sync = _plain(session)
    it = _Put(model, call, Enqueued(call.kind, call.options.queue))
    # _flushing: an own flag raised in before_flush would never be lowered when a flush fails
    if sync._flushing:
        _during_flush(sync, it)
    else:
        _hold(sync, it)
    return it.handle


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


def _hold(session: Session, it: _Put) -> None:
    """Keep a call in the session: it is not clean any more, and what drops its objects drops the call."""
    if it.placeholder is None:
        mapper: Mapper[Any] = inspect(it.model)
        # never Job(...): a user's __init__ may want arguments, a dataclass base forbids ours
        mapper.registry.configure()
        it.placeholder = mapper.class_manager.new_instance()
        it.placeholder.__dict__[_CALL] = it
    session.add(it.placeholder)
    it.transaction = _transaction(session)
    calls: list[_Put] = session.info.setdefault(_CALLS, [])
    if calls and not _goes_on(calls[0]):  # a session that only rolls back would keep them all
        calls[:] = [each for each in calls if _wanted(session, each)]
    calls.append(it)


def _during_flush(session: Session, it: _Put) -> None:
    """A call from a user's own flush listener: written at once, or with those that wait already."""
    calls: list[_Put] = session.info.get(_CALLS, [])
    if calls or _waits(session, it):
        it.transaction = _transaction(session)
        calls.append(it)
        session.info[_CALLS] = calls
    else:
        _write(session, [it])


def _transaction(session: Session) -> SessionTransaction | None:
    return session.get_nested_transaction() or session.get_transaction()


def _goes_on(it: _Put) -> bool:
    return it.transaction is not None and it.transaction.is_active


def _wanted(session: Session, it: _Put) -> bool:
    # a rolled-back savepoint, expunge and close take placeholders away
    return _goes_on(it) if it.placeholder is None else it.placeholder in session


@event.listens_for(Session, "before_flush")
def _before_flush(session: Session, context: UOWTransaction, instances: object) -> None:
    calls: list[_Put] | None = session.info.get(_CALLS)
    if not calls:
        return
    calls[:] = [it for it in calls if _wanted(session, it)]
    # What raises up to the expunge leaves all as it is: the next flush, the one of commit included, meets
    # it again. Emptied first, a refused argument would lose every other job of the flush.
    references = [reference for it in calls for reference in it.call.arguments.references]
    pending = [reference for reference in references if _is_pending(session, reference)]
    if not pending:
        _write(session, calls)
    for it in calls:
        if it.placeholder is not None:
            session.expunge(it.placeholder)
            it.placeholder = None
    if not pending:
        del session.info[_CALLS]


@event.listens_for(Session, "after_flush")
def _after_flush(session: Session, context: UOWTransaction) -> None:
    calls: list[_Put] | None = session.info.pop(_CALLS, None)
    if not calls:
        return
    # an entity that another after_flush listener added gets its identity in the next flush
    waiting = {it for it in calls if _waits(session, it)}
    if waiting:
        session.info[_CALLS] = [it for it in calls if it in waiting]
    _write(session, [it for it in calls if it not in waiting])


@event.listens_for(Session, "before_commit")
def _before_commit(session: Session) -> None:
    """Calls whose flush ended before its second event (a listener raised, no work was left) get another."""
    calls: list[_Put] = session.info.pop(_CALLS, [])
    for it in calls:
        if _wanted(session, it):
            _hold(session, it)


@event.listens_for(JobMixin, "before_insert", propagate=True)
def _never_half_resolved(mapper: Mapper[Any], connection: Connection, target: JobMixin) -> None:
    if _CALL in target.__dict__:
        raise SqlaJobsError(
            "a job that was enqueued is about to be written without its arguments; this happens when a "
            "flush listener adds it back to the session: leave it alone"
        )


# -- identities


def _is_pending(session: Session, reference: Reference) -> bool:
    """Whether this flush is to insert the entity. Raises `PayloadError` for one that no flush here will.

    A key that it has already may still change, in a before_insert listener or by a relationship.
    """
    state: InstanceState[Any] = inspect(reference.entity)
    if state.identity is None and reference.entity not in session:
        problem = "is pending in another session" if state.pending else "is not in the session"
        raise PayloadError(
            f"argument {reference.path}: the {type(reference.entity).__name__} {problem}, so this flush "
            "gives it no identity: session.add() it and flush again, or roll back",
            path=reference.path,
        )
    return state.identity is None


def _waits(session: Session, it: _Put) -> bool:
    return any(_identity(session, reference) is None for reference in it.call.arguments.references)


def _identity(session: Session, reference: Reference) -> tuple[Any, ...] | None:
    """The primary key of an entity argument; None while it waits for its INSERT.

    inspect(entity).identity and not its attributes: it needs no SQL, also of an expired or detached one.
    """
    state: InstanceState[Any] = inspect(reference.entity)
    if not _is_pending(session, reference):
        return state.identity
    key = state.mapper.primary_key_from_instance(reference.entity)
    return None if any(part is None or isinstance(part, ClauseElement) for part in key) else tuple(key)


@cache
def _key_converters(mapper: Mapper[Any]) -> tuple[Converter, ...]:
    return tuple(converter(_python_type(key)) for key in mapper.primary_key)


def _python_type(key: Any) -> type:
    try:
        found: type = key.type.python_type
    except NotImplementedError:
        return str
    return found


class _Entity:
    """Between a mapped instance and its plain primary key; a list when the key is composite."""

    def __init__(self, mapper: Mapper[Any]) -> None:
        self._mapper = mapper
        self._class = mapper.class_

    def encode(self, value: object, path: str) -> Reference:
        if not isinstance(value, self._class):
            raise PayloadError(
                f"{path} must be {self._class.__name__}, got {type(value).__name__}", path=path
            )
        return Reference(value, path)

    def decode(self, value: Json, path: str, load: Load) -> object:
        keys = _key_converters(self._mapper)
        stored = value if len(keys) > 1 else [value]
        if not isinstance(stored, list) or len(stored) != len(keys):
            raise PayloadError(
                f"{path} must be the primary key of {self._class.__name__}, which has {len(keys)} columns",
                path=path,
            )
        identity = tuple(key.decode(part, path, load) for key, part in zip(keys, stored, strict=True))
        return load(self._class, identity if len(keys) > 1 else identity[0])


def _stored(reference: Reference, identity: tuple[Any, ...]) -> Json:
    mapper: Mapper[Any] = inspect(reference.entity).mapper
    parts: list[Any] = [
        key.encode(part, reference.path) for key, part in zip(_key_converters(mapper), identity, strict=True)
    ]
    return parts[0] if len(parts) == 1 else parts


def entity_hook(annotation: object) -> Converter | None:
    """A converter for mapped classes, for `core.payload`: they travel as their identity."""
    mapper: Any = inspect(annotation, raiseerr=False) if isinstance(annotation, type) else None
    return _Entity(mapper) if isinstance(mapper, Mapper) else None


# -- the statement

_PARAMETERS = (
    ("queue", Text),
    ("kind", Text),
    ("payload", Text),
    ("priority", SmallInteger),
    ("run_at", None),
    ("delay", Interval),
    ("max_attempts", Integer),
    ("expires_at", None),
    ("expires_in", Interval),
    ("meta", Text),
)


@cache
def put_statement(jobs: Table) -> Executable:
    """All jobs of a flush in one statement of constant text, ids in the order of the calls.

    The rows are sorted below the INSERT, and PostgreSQL draws the identity above the sort.
    """
    moment = jobs.c.run_at.type
    types = {name: type_ or moment for name, type_ in _PARAMETERS}
    given = (
        func.unnest(*[bindparam(f"{name}_s", type_=ARRAY(type_)) for name, type_ in types.items()])
        .table_valued(
            *[column(name, type_) for name, type_ in types.items()],
            with_ordinality="place",
            name="given",
        )
        .render_derived()
    )
    now = func.statement_timestamp()
    g = given.c
    values = {
        "queue": g.queue,
        "kind": g.kind,
        "payload": cast(g.payload, JSONB),
        "priority": g.priority,
        "run_at": func.coalesce(g.run_at, now + g.delay, now),
        "max_attempts": g.max_attempts,
        "expires_at": func.coalesce(g.expires_at, now + g.expires_in),
        "meta": cast(g.meta, JSONB),
    }
    rows = select(*values.values()).order_by(literal_column("place", BigInteger))
    return insert(jobs).from_select(list(values), rows, include_defaults=False).returning(jobs.c.id)


def _write(session: Session, calls: list[_Put]) -> None:
    """Write calls in order; those of one model in one statement."""
    by_model: dict[type[JobMixin], list[_Put]] = {}
    for it in calls:
        by_model.setdefault(it.model, []).append(it)
    for model, its in by_model.items():
        mapper: Mapper[Any] = inspect(model)
        jobs = mapper.local_table
        assert isinstance(jobs, Table)
        connection = session.connection(bind_arguments={"mapper": mapper})
        if session.twophase:
            # PREPARE TRANSACTION refuses a transaction that has sent a NOTIFY (manual: PREPARE TRANSACTION)
            connection.execute(text("SELECT set_config('sqla_jobs.notify', 'off', true)"))
        rows = [_row(session, it) for it in its]
        parameters = {f"{name}_s": [row[i] for row in rows] for i, (name, _) in enumerate(_PARAMETERS)}
        ids = connection.scalars(put_statement(jobs), parameters).all()
        for it, id_ in zip(its, sorted(ids), strict=True):
            it.handle._id = id_


def _row(session: Session, it: _Put) -> tuple[Any, ...]:
    options = it.call.options
    expires = options.expires

    def identity_of(reference: Reference) -> Json:
        identity = _identity(session, reference)
        assert identity is not None  # else the call would still wait
        return _stored(reference, identity)

    payload = it.call.arguments.text(identity_of)
    expires_at = expires if isinstance(expires, datetime) else None
    expires_in = expires if isinstance(expires, timedelta) else None
    meta = json.dumps({"tags": list(options.tags)}) if options.tags else None
    return (
        options.queue,
        it.call.kind,
        payload,
        options.priority,
        options.run_at,
        options.delay,
        options.max_attempts,
        expires_at,
        expires_in,
        meta,
    )
