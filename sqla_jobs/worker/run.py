"""Run one attempt: decode its arguments, call the handler, turn whatever happens into a verdict.

The one place with a broad except: around user code. Nothing that a payload, a handler or its return
value does gets past it. Does not claim or settle, except what a handler's own session commits.
"""

import asyncio
import contextvars
import inspect
import random
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from sqla_jobs.context import Attempt, Cancel, JobContext, RetryAfter, Snooze
from sqla_jobs.core.lifecycle import Aborted, Outcome, Raised, Released, Returned, Snoozed, Verdict, judge
from sqla_jobs.core.retention import Retention
from sqla_jobs.errors import EntityGone, LeaseLost
from sqla_jobs.models import Tables
from sqla_jobs.store.claim import ClaimedJob
from sqla_jobs.tasks import Task
from sqla_jobs.worker.failure import describe, storable
from sqla_jobs.worker.session import HandlerSession, abandon, end_read, settle_through

__all__ = ["Ended", "Run", "Runner"]

_LONGEST = timedelta(days=36_525)  # beyond it lies the end of PostgreSQL's calendar


@dataclass(slots=True, eq=False)
class Run(Attempt):
    """One claimed job on its way through the worker."""

    job: ClaimedJob = None  # type: ignore[assignment]
    task: Task[Any] = None  # type: ignore[assignment]
    running_in: "asyncio.Task[None] | None" = None
    released: bool = False  # given back before it ended: its outcome is not wanted any more
    draining: bool = False  # told to end by the drain limit
    told: bool = False  # its loss has been reported
    ended: bool = False

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


class Runner:
    """Runs attempts in a thread or in the loop, with the engines that handlers' sessions need."""

    def __init__(
        self,
        tables: Tables,
        *,
        engine: Engine | None,
        async_engine: AsyncEngine | None,
        retention: Retention,
        spread: Callable[[], float] = random.random,
    ) -> None:
        self._tables = tables
        self._engine = engine
        self._async_engine = async_engine
        self._retention = retention
        self._spread = spread

    # -- in a thread

    def in_thread(self, run: Run) -> Ended:
        """Run a sync handler here. Never raises."""
        if run.lost or run.released:
            return Ended(run, None)  # while it waited for a slot
        session: HandlerSession | None = None

        def open_session() -> HandlerSession:
            nonlocal session
            if session is None:
                assert self._engine is not None
                session = HandlerSession(engine=self._engine)
            return session

        try:
            arguments = self._decoded(run, open_session)
            if session is not None:
                end_read(session)
            _refuse_awaitable(self._call(run, open_session, arguments))
            outcome: Outcome = Returned()
            if session is not None:
                _require_lease(run)
                committed = settle_through(session, self._tables, self._entry(run, outcome), self._retention)
                if committed is not None:
                    return self._through_session(run, outcome, committed=committed)
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
        session: AsyncSession | None = None

        def open_session() -> AsyncSession:
            nonlocal session
            if session is None:
                assert self._async_engine is not None
                session = AsyncSession(
                    sync_session_class=HandlerSession, engine=self._async_engine.sync_engine
                )
            return session

        run.running_in = asyncio.current_task()
        try:
            if run.task.takes_entities:
                arguments = await open_session().run_sync(_decode_and_end, self, run)
            else:
                arguments = self._decoded(run, _no_session)
            # a context of its own: the consumer's task is reused, and would hand one job's context
            # variables to the next
            await in_context(self._call(run, open_session, arguments), contextvars.copy_context())
            outcome: Outcome = Returned()
            if session is not None:
                _require_lease(run)
                committed = await _to_its_end(
                    session.run_sync(
                        settle_through,  # type: ignore[arg-type]
                        self._tables,
                        self._entry(run, outcome),
                        self._retention,
                    )
                )
                if committed is not None:
                    return self._through_session(run, outcome, committed=committed)
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

    def _call(self, run: Run, open_session: Callable[[], Any], arguments: dict[str, object]) -> Any:
        task, job = run.task, run.job
        if not task.takes_context:
            return task.function(**arguments)
        context: JobContext[Any] = JobContext(
            id=job.lease.id,
            queue=job.lease.queue,
            kind=job.kind,
            attempt=job.attempt,
            max_attempts=job.max_attempts,
            open_session=open_session,
            state=run,
        )
        return task.function(context, **arguments)

    def _entry(self, run: Run, outcome: Outcome) -> Any:
        return run.job.lease, self._judged(run, outcome)

    def _judged(self, run: Run, outcome: Outcome) -> Verdict:
        return judge(outcome, attempt=run.job.attempt, max_attempts=run.job.max_attempts)

    def _ended(self, run: Run, outcome: Outcome) -> Ended:
        run.ended = True
        # also of a run that was lost or given back: whoever keeps the books knows, and leaves it out
        return Ended(run, self._judged(run, outcome))

    def _through_session(self, run: Run, outcome: Outcome, *, committed: bool) -> Ended:
        run.ended = True
        if committed:
            return Ended(run, None, written=self._judged(run, outcome))
        run.lost = True
        return Ended(run, None)

    def broken(self, run: Run, error: BaseException) -> Ended:
        """A run whose consumer met what nobody expected."""
        return self._ended(run, self._outcome_of(error, run))

    def _outcome_of(self, error: BaseException, run: Run) -> Outcome:
        try:
            return self._understood(error, run)
        except BaseException as worse:  # an exception class of a user's that fails when it is looked at
            return Raised(describe(worse), run.task.retry.wait(run.job.attempt, spread=self._spread()))

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
            case asyncio.CancelledError() if run.draining:
                return Released()
        return Raised(describe(error), self._delay_after(error, run))

    def _delay_after(self, error: BaseException, run: Run) -> timedelta | None:
        retry = run.task.retry
        # a user's rule may raise anything; the job must not suffer twice
        with suppress(BaseException):
            delay = retry.wait_after(error, run.job.attempt, spread=self._spread())
            return None if delay is None else _waitable(delay)
        return retry.wait(run.job.attempt, spread=self._spread())


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


def _refuse_awaitable(result: object) -> None:
    """A plain function that returns a coroutine has not run what it was written for."""
    if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError(
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
