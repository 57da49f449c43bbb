"""Run one attempt: decode its arguments, call the handler, turn whatever happens into a verdict.

The one place with a broad except: around user code. Nothing that a payload, a handler or its return
value does gets past it. Does not claim or settle, except what a handler's own session commits.
"""

import asyncio
import contextvars
import inspect
import random
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from sqla_jobs.context import Attempt, Cancel, JobContext, RetryAfter, Snooze
from sqla_jobs.core.lifecycle import Aborted, Outcome, Raised, Released, Returned, Snoozed, Verdict, judge
from sqla_jobs.core.retention import Retention
from sqla_jobs.errors import ConfigurationError, EntityGone, LeaseLost, PayloadError, TimeLimitExceeded
from sqla_jobs.events import Events
from sqla_jobs.store.claim import ClaimedJob
from sqla_jobs.store.settle import Settled
from sqla_jobs.tasks import Jobs, Task
from sqla_jobs.worker.failure import describe, forget_frames, storable
from sqla_jobs.worker.session import HandlerSession, abandon, end_read, settle_through

__all__ = ["Ended", "Run", "Runner"]

_LONGEST = timedelta(days=36_525)  # beyond it lies the end of PostgreSQL's calendar
_MOMENT = timedelta(seconds=1)


@dataclass(slots=True, eq=False)
class Run(Attempt):
    """One claimed job on its way through the worker."""

    job: ClaimedJob = None  # type: ignore[assignment]
    task: Task[Any] = None  # type: ignore[assignment]
    running_in: "asyncio.Task[None] | None" = None
    released: bool = False  # given back before it ended: its outcome is not wanted any more
    draining: bool = False  # told to end by the drain limit
    cancel_requested: bool = False  # somebody cancels the job
    timed_out: bool = False  # its time limit has passed
    told: bool = False  # its loss has been reported
    ended: bool = False
    started: float | None = None  # time.monotonic()
    bucket: int | None = None  # where the time limits keep it
    session: HandlerSession | None = None
    remarked: bool = False
    session_remarked: bool = False

    @property
    def timeout(self) -> float | None:
        """The task's time limit in seconds."""
        limit = self.task.timeout
        return None if limit is None else limit.total_seconds()

    @property
    def session_opened(self) -> float | None:
        """When ctx.session has taken the connection that it holds."""
        return None if self.session is None else self.session.opened

    def cut(self) -> tuple[int, float] | None:
        """End whatever its session waits for; see HandlerSession.cut."""
        return None if self.session is None else self.session.cut()

    def cancel(self) -> None:
        """Ask the handler to end: at its next await, or when it looks at ctx.cancelled."""
        self.cancelled = True
        if self.running_in is not None:
            self.running_in.cancel()


@dataclass(slots=True, eq=False)
class Ended:
    """How a run ended. `verdict` None: nothing is to be written (the lease is lost, or it is written)."""

    run: Run
    verdict: Verdict | None
    written: Verdict | None = None


class Limits(Protocol):
    """Whoever watches the time limits of attempts."""

    def started(self, run: Run, seconds: float) -> None:
        """Its time runs from now."""

    def ended(self, run: Run) -> None:
        """It needs no watching any more."""


class Runner:
    """Runs attempts in a thread or in the loop.

    `source` and `async_source` are what handlers' sessions take their connections from: the sync engines
    (of an AsyncEngine, its sync side), or one connection whose transaction is somebody else's.
    """

    def __init__(
        self,
        jobs: Jobs,
        *,
        source: Engine | Connection | None,
        async_source: Engine | Connection | None,
        events: Events,
        limits: Limits | None = None,
        spread: Callable[[], float] = random.random,
    ) -> None:
        self._tables = jobs.tables
        self._retention: Retention = jobs.retention
        self._around = jobs.middlewares
        self._source = source
        self._async_source = async_source
        self._events = events
        self._limits = limits
        self._spread = spread

    # -- in a thread

    def in_thread(self, run: Run) -> Ended:
        """Run a sync handler here. Never raises."""
        if run.lost or run.released:
            return Ended(run, None)  # while it waited for a slot
        if run.cancel_requested:
            return Ended(run, self._judged(run, Aborted("cancelled before it began")))
        session: HandlerSession | None = None

        def open_session() -> HandlerSession:
            nonlocal session
            if session is None:
                if self._source is None:
                    raise ConfigurationError("ctx.session of a plain handler needs engine= or a URL")
                session = run.session = HandlerSession(source=self._source)
            return session

        self._begin(run)
        try:
            arguments = self._decoded(run, open_session)
            if session is not None:
                end_read(session)
            call = self._surrounded if self._around else _call
            result = call(run.task, self._context(run, open_session), arguments)
            _refuse_awaitable(result)
            outcome: Outcome = self._returned(run, result)
            if session is not None:
                _require_lease(run)
                settled = settle_through(session, self._tables, self._entry(run, outcome), self._retention)
                if settled is not None:
                    return self._through_session(run, settled)
        except BaseException as error:
            outcome = self._outcome_of(error, run)
            if session is not None:
                with suppress(Exception):  # as below
                    abandon(session)
        return self._ended(run, outcome)

    # -- in the loop

    async def in_loop(self, run: Run) -> Ended:
        """Run an async handler here, in a context of its own. Raises nothing but GeneratorExit."""
        if run.lost or run.released:
            return Ended(run, None)  # while it waited for a slot
        if run.cancel_requested:
            return Ended(run, self._judged(run, Aborted("cancelled before it began")))
        session: AsyncSession | None = None

        def open_session() -> AsyncSession:
            nonlocal session
            if session is None:
                if self._async_source is None:
                    raise ConfigurationError("ctx.session of an async handler needs async_engine= or a URL")
                session = AsyncSession(
                    sync_session_class=HandlerSession,
                    source=self._async_source,
                    expire_on_commit=False,  # an attribute read after a commit could not await its SELECT
                )
                inner = session.sync_session
                assert isinstance(inner, HandlerSession)
                run.session = inner
            return session

        self._begin(run)
        run.running_in = asyncio.current_task()
        try:
            if run.task.takes_entities:
                arguments = await open_session().run_sync(_decode_and_end, self, run)
            else:
                arguments = self._decoded(run, _no_session)
            # a context of its own: the consumer's task is reused, and would hand one job's context
            # variables to the next
            call = self._surrounded_in_loop if self._around else _call
            coroutine = call(run.task, self._context(run, open_session), arguments)
            result = await in_context(coroutine, contextvars.copy_context())
            outcome: Outcome = self._returned(run, result)
            if session is not None:
                _require_lease(run)
                settled = await _to_its_end(
                    session.run_sync(
                        settle_through,  # type: ignore[arg-type]
                        self._tables,
                        self._entry(run, outcome),
                        self._retention,
                    )
                )
                if settled is not None:
                    return self._through_session(run, settled)
        except BaseException as error:
            if isinstance(error, GeneratorExit):
                raise  # the loop is gone; a handler's own comes as a RuntimeError
            outcome = self._outcome_of(error, run)
            if session is not None:
                with suppress(Exception):  # the connection is broken: the server rolls back by itself
                    await _to_its_end(session.run_sync(abandon))  # type: ignore[arg-type]
        finally:
            await _forget_cancel(run)
        return self._ended(run, outcome)

    # -- both

    def _decoded(self, run: Run, open_session: Callable[[], Session]) -> dict[str, object]:
        def load(cls: type, identity: object) -> object:
            entity: object = open_session().get(cls, identity)
            if entity is None:
                raise EntityGone(f"{cls.__name__} {identity} no longer exists")
            return entity

        return run.task.parameters.decode(run.job.payload, load)

    def _begin(self, run: Run) -> None:
        run.started = time.monotonic()
        if run.timeout is not None and self._limits is not None:
            self._limits.started(run, run.timeout)

    def _context(self, run: Run, open_session: Callable[[], Any]) -> JobContext[Any] | None:
        """For the handler or a middleware; None when nobody wants one."""
        if not run.task.takes_context and not self._around:
            return None
        job = run.job
        return JobContext(
            id=job.lease.id,
            queue=job.lease.queue,
            kind=job.kind,
            attempt=job.attempt,
            max_attempts=job.max_attempts,
            open_session=open_session,
            state=run,
        )

    def _surrounded(self, task: Task[Any], context: Any, arguments: dict[str, object]) -> Any:
        """A plain function inside the middlewares, in this thread."""
        with ExitStack() as stack:
            for factory in self._around:
                stack.enter_context(_plain_manager(factory, context))
            return _call(task, context, arguments)
        # here when a middleware has swallowed what the handler raised: it counts as a return

    async def _surrounded_in_loop(self, task: Task[Any], context: Any, arguments: dict[str, object]) -> Any:
        """A coroutine function inside the middlewares, in the context that steps this."""
        with ExitStack() as stack:
            for factory in self._around:
                stack.enter_context(_plain_manager(factory, context))
            return await _call(task, context, arguments)

    def _returned(self, run: Run, value: object) -> Outcome:
        """A result that cannot be stored is left out: the work is done, and must not be done again."""
        if inspect.iscoroutine(value):
            value.close()  # nobody will await it
        if not run.task.store_result or value is None:
            return Returned()
        try:
            return Returned(run.task.results.text(value))
        except Exception as error:
            lease = run.job.lease
            said = str(error) if isinstance(error, PayloadError) else type(error).__name__
            self._events.emit(
                "result.refused", job=lease.id, queue=lease.queue, kind=run.job.kind, error=said
            )
            return Returned()

    def _entry(self, run: Run, outcome: Outcome) -> Any:
        return run.job.lease, self._judged(run, outcome)

    def _judged(self, run: Run, outcome: Outcome) -> Verdict:
        return judge(outcome, attempt=run.job.attempt, max_attempts=run.job.max_attempts)

    def _over(self, run: Run) -> None:
        run.ended = True
        if run.bucket is not None and self._limits is not None:
            self._limits.ended(run)

    def _ended(self, run: Run, outcome: Outcome) -> Ended:
        self._over(run)
        # also of a run that was lost or given back: whoever keeps the books knows, and leaves it out
        return Ended(run, self._judged(run, outcome))

    def _through_session(self, run: Run, settled: Settled) -> Ended:
        self._over(run)
        if not settled.written:
            run.lost = True
            return Ended(run, None)
        [(lease, verdict)] = settled.written
        for _, error in settled.kept:
            self._events.emit(
                "archive.refused", job=lease.id, queue=lease.queue, kind=run.job.kind, error=error
            )
        return Ended(run, None, written=verdict)

    def given_up(self, run: Run) -> Verdict:
        """On an attempt past its time limit that does not end: it has failed, although it still runs."""
        error = TimeLimitExceeded(f"{_limit(run)}, and its handler does not end")
        delay = self._delay_after(error, run)
        # not at once: this process needs a moment to end, and the handler with it
        return self._judged(run, Raised(describe(error), None if delay is None else max(delay, _MOMENT)))

    def broken(self, run: Run, error: BaseException) -> Ended:
        """A run whose consumer met what nobody expected."""
        return self._ended(run, self._outcome_of(error, run))

    def _outcome_of(self, error: BaseException, run: Run) -> Outcome:
        try:
            return self._understood(error, run)
        except BaseException as worse:  # an exception class of a user's that fails when it is looked at
            return Raised(describe(worse), run.task.retry.wait(run.job.attempt, spread=self._spread()))
        finally:
            forget_frames(error)

    def _understood(self, error: BaseException, run: Run) -> Outcome:
        match error:
            case Snooze():
                return Snoozed(_waitable(error.delay))
            case Cancel():
                return Aborted(storable(error.reason))
            case EntityGone():
                return Aborted(storable(str(error)))
            case RetryAfter():
                return Raised(describe(error.__cause__ or error), _waitable(error.delay))
            case asyncio.CancelledError() if run.cancel_requested:
                return Aborted("cancelled while it ran")
            case asyncio.CancelledError() if run.timed_out:
                late = TimeLimitExceeded(_limit(run)).with_traceback(error.__traceback__)
                return Raised(describe(late), self._delay_after(late, run))
            case asyncio.CancelledError() if run.draining:
                return Released()
            case _NotRun():
                plain = TypeError(*error.args).with_traceback(error.__traceback__)
                return Raised(describe(plain), None)
        return Raised(describe(error), self._delay_after(error, run))

    def _delay_after(self, error: BaseException, run: Run) -> timedelta | None:
        retry = run.task.retry
        # a user's rule may raise and return anything; the job must not suffer twice
        try:
            delay = retry.wait_after(error, run.job.attempt, spread=self._spread())
            if delay is None or delay >= timedelta(0):
                return None if delay is None else _waitable(delay)
            said = f"a rule of the task's Retry gave {delay}"
        except BaseException as worse:
            said = f"a rule of the task's Retry failed: {type(worse).__name__}"
        lease = run.job.lease
        self._events.emit("delay.refused", job=lease.id, queue=lease.queue, kind=run.job.kind, error=said)
        return retry.wait(run.job.attempt, spread=self._spread())


def _call(task: Task[Any], context: JobContext[Any] | None, arguments: dict[str, object]) -> Any:
    """The handler's function; of a coroutine function, its coroutine."""
    return task.function(context, **arguments) if task.takes_context else task.function(**arguments)


def _plain_manager(factory: Callable[[Any], Any], context: JobContext[Any]) -> AbstractContextManager[Any]:
    manager = factory(context)
    if not isinstance(manager, AbstractContextManager):
        if inspect.iscoroutine(manager):
            manager.close()
        name = getattr(factory, "__qualname__", repr(factory))
        raise TypeError(
            f"middleware {name} must return a plain context manager, got {type(manager).__name__}; "
            "an async one cannot surround a handler in a thread"
        )
    return manager


def _limit(run: Run) -> str:
    return f"the attempt passed its time limit of {run.timeout:g} s"


def _require_lease(run: Run) -> None:
    """Spare the commit of what is known to be too late; the fence would refuse it anyway."""
    if run.lost or run.released:
        raise LeaseLost(f"job {run.job.lease.id}: the lease was lost while its handler ran")


def _no_session() -> Session:
    raise AssertionError("no parameter of this task is an entity")


def _decode_and_end(session: Session, runner: Runner, run: Run) -> dict[str, object]:
    assert isinstance(session, HandlerSession)
    arguments = runner._decoded(run, lambda: session)
    end_read(session)
    return arguments


async def _to_its_end(work: Awaitable[Any]) -> Any:
    """Await `work` whatever happens to the task that waits: a commit is never cancelled half-way."""
    future = asyncio.ensure_future(work)
    while not future.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait({future})
    return future.result()


def _waitable(delay: object) -> timedelta:
    """A delay that can be written, whatever a subclass of ours or a rule of the user's says."""
    if not isinstance(delay, timedelta):
        raise TypeError(f"a delay must be a timedelta, got {type(delay).__name__}")
    return min(max(delay, timedelta(0)), _LONGEST)


class _NotRun(TypeError):
    """What a handler returned was to be run by somebody. Not tried again: only new code helps."""


def _refuse_awaitable(result: object) -> None:
    """A plain function that returns a coroutine has not run what it was written for."""
    try:
        runs = inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result)
    except Exception:  # a proxy of the user's that stands for nothing now
        return
    if runs:
        if inspect.iscoroutine(result):
            result.close()
        raise _NotRun(
            f"the handler returned a {type(result).__name__}, which nobody runs: "
            "make the task of an async def, not of a plain function around it"
        )


async def _forget_cancel(run: Run) -> None:
    """The consumer's task lives on: without this, later scopes in it think they are being cancelled."""
    task, run.running_in = run.running_in, None
    if task is None or not task.cancelling():
        return
    while task.cancelling():
        task.uncancel()
    # a cancellation that was asked for and not delivered yet comes here (uncancel takes it back from 3.13 on)
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(0)


@types.coroutine
def in_context(coroutine: Coroutine[Any, Any, Any], context: contextvars.Context) -> Generator[Any, Any, Any]:
    """Step a coroutine inside `context`, whichever task drives it. Forwards send, throw and close."""
    step, value = coroutine.send, None
    while True:
        try:
            yielded = context.run(step, value)
        except StopIteration as stop:
            return stop.value
        except GeneratorExit as error:  # raised by the handler: what closes us comes at the yield
            raise RuntimeError("the handler raised GeneratorExit") from error
        try:
            value = yield yielded
            step = coroutine.send
        except GeneratorExit:
            coroutine.close()
            raise
        except BaseException as error:
            step, value = coroutine.throw, error
