"""The tasks of an application: `Jobs` and its decorator."""

import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Session, scoped_session

from sqla_jobs.context import JobContext
from sqla_jobs.core.call import Options, check_name
from sqla_jobs.core.retention import Retention
from sqla_jobs.core.retry import Retry
from sqla_jobs.errors import ConfigurationError, DuplicateTask
from sqla_jobs.models import JobMixin, Tables, job_model, tables_of
from sqla_jobs.store import find as store_find
from sqla_jobs.store.find import JobRecord
from sqla_jobs.tasks.definition import check_function, check_timeout, context_kind, kind_of, same_place, texts
from sqla_jobs.tasks.task import (
    ContextTask,
    Decorator,
    PlainTask,
    RemoteTask,
    Task,
    UniqueKey,
    check_on_conflict,
    check_unique_key,
)

__all__ = ["Jobs", "Middleware"]

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=JobContext[Any])
#: Given the context of an attempt, it returns what surrounds the handler.
Middleware = Callable[[JobContext[Any]], AbstractContextManager[Any]]


class Jobs:
    """The tasks of an application, bound to its Job class.

    Without a model, the ready-made one on `sqla_jobs.metadata` is used. `imports` names modules with
    more tasks, which the worker imports. `engine` and `async_engine` serve a worker that is given no URL.

    >>> jobs = Jobs()
    >>> @jobs.task(queue="mail", name="greet")
    ... def greet(name: str) -> None:
    ...     print(f"hello {name}")
    >>> greet("Ada")
    hello Ada
    """

    def __init__(
        self,
        model: type[JobMixin] | None = None,
        *,
        engine: Engine | None = None,
        async_engine: AsyncEngine | None = None,
        imports: Iterable[str] = (),
        retention: Retention = Retention(),  # noqa: B008 - frozen
    ) -> None:
        self.Job: type[JobMixin] = job_model() if model is None else model
        self.tables: Tables = tables_of(self.Job)
        self.engine = engine
        self.async_engine = async_engine
        self.imports = texts("imports", imports)
        self.retention = retention
        self.middlewares: list[Middleware] = []
        self._tasks: dict[str, Task[Any]] = {}

    @property
    def tasks(self) -> Mapping[str, Task[Any]]:
        """Every task by its kind, and once more by each of its aliases."""
        return types.MappingProxyType(self._tasks)

    @overload
    def task(self, function: Callable[Concatenate[C, P], R], /) -> ContextTask[C, P, R]: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def task(self, function: Callable[P, R], /) -> PlainTask[P, R]: ...
    @overload
    def task(
        self,
        /,
        *,
        name: str | None = None,
        aliases: Iterable[str] = (),
        queue: str = "default",
        priority: int = 0,
        retry: Retry = ...,
        timeout: timedelta | None = None,
        store_result: bool = False,
        unique_key: UniqueKey | None = None,
        on_conflict: Literal["skip"] = "skip",
    ) -> Decorator: ...
    def task(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        aliases: Iterable[str] = (),
        queue: str = "default",
        priority: int = 0,
        retry: Retry = Retry(),  # noqa: B008 - frozen
        timeout: timedelta | None = None,
        store_result: bool = False,
        unique_key: UniqueKey | None = None,
        on_conflict: Literal["skip"] = "skip",
    ) -> Any:
        """Make a function a task: `@jobs.task` or `@jobs.task(queue="mail", retry=Retry(max_attempts=8))`.

        Its kind is `module.function` unless `name` says otherwise; `aliases` are older names under which
        jobs may still wait. A first parameter annotated `JobContext` (`AsyncJobContext` for an
        `async def`) is handed in by the worker.

        `timeout` limits an attempt: a coroutine is cancelled at its limit and the attempt has failed. A
        thread cannot be stopped: `ctx.cancelled` turns true, the job keeps its lease, and when it still
        runs one more `timeout` later the worker ends its other jobs and exits with 7. `store_result` keeps
        what the handler returns, as JSON by its return annotation; what cannot be stored is left out.
        `unique_key`, a text or a function of the arguments that returns one: while an equal job of the queue
        waits or runs, `enqueue` makes no second one.

        Raises `TaskDefinitionError` for a function that cannot be one (a method, a lambda, a partial, a
        generator, *args), `DuplicateTask` when the kind is taken, `ConfigurationError` for an option.
        """
        if not isinstance(retry, Retry):
            raise ConfigurationError(f"retry takes a Retry(...), got {retry!r}")
        check_timeout(timeout)
        check_on_conflict(on_conflict)
        key = None if unique_key is None else check_unique_key(unique_key)
        options = Options(queue=queue, priority=priority, max_attempts=retry.max_attempts)
        older = tuple(check_name("alias", alias) for alias in texts("aliases", aliases))

        def make(function: Callable[..., Any]) -> Task[Any]:
            check_function(function, named=name is not None)
            kind = check_name("kind", kind_of(function) if name is None else name)
            cls: type[Task[Any]] = PlainTask if context_kind(function) is None else ContextTask
            made = cls(
                self,
                function,
                kind=kind,
                aliases=older,
                options=options,
                retry=retry,
                timeout=timeout,
                store_result=store_result,
                unique_key=key,
            )
            self._register(made)
            return made

        return Decorator(make) if function is None else make(function)

    def _register(self, task: Task[Any]) -> None:
        for kind in (task.kind, *task.aliases):
            other = self._tasks.get(kind)
            # the same function again is a module that was reloaded
            if other is not None and not same_place(other.function, task.function):
                raise DuplicateTask(
                    f"kind {kind!r} is taken by {other.function.__module__}.{other.function.__qualname__}; "
                    f"give {task.function.__module__}.{task.function.__qualname__} another name="
                )
        for kind in (task.kind, *task.aliases):
            self._tasks[kind] = task

    def remote(
        self,
        kind: str,
        /,
        *,
        queue: str = "default",
        priority: int = 0,
        max_attempts: int = 20,
        unique_key: UniqueKey | None = None,
    ) -> RemoteTask:
        """A task whose handler another program registers under `kind`: for one that must not import it.

        Enqueue it with keyword arguments; each travels by its own type, as the handler's annotation of that
        type would have sent it. What the handler does not take shows when the job runs.

        >>> jobs = Jobs()
        >>> jobs.remote("app.tasks.send_receipt", queue="mail").options.queue
        'mail'
        """
        options = Options(queue=queue, priority=priority, max_attempts=max_attempts)
        key = None if unique_key is None else check_unique_key(unique_key)
        return RemoteTask(self, kind=check_name("kind", kind), options=options, unique_key=key)

    def around(self, factory: Middleware) -> Middleware:
        """Surround every attempt with a context manager: `factory(ctx)` returns it. Also a decorator.

        It is entered in the handler's own thread or task, after the arguments are loaded, and left before
        the job is settled; the first registered is the outermost. It sees what the handler raises, and may
        raise itself: then the attempt has failed. Plain context managers only, also around coroutines.

        Raises `ConfigurationError` for an async one.

        >>> from contextlib import contextmanager
        >>> jobs = Jobs()
        >>> @jobs.around
        ... @contextmanager
        ... def timed(ctx):
        ...     ctx.log.info("begins")
        ...     yield
        ...     ctx.log.info("ends")
        """
        inner = inspect.unwrap(factory) if callable(factory) else factory
        if not callable(factory) or inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner):
            raise ConfigurationError(
                f"around takes a function of the context that returns a plain context manager, got "
                f"{getattr(factory, '__qualname__', factory)!r}"
                + ("; it is async, and could not surround a handler in a thread" if callable(factory) else "")
            )
        self.middlewares.append(factory)
        return factory

    def find(self, session: "Session | scoped_session[Any] | Connection", job_id: int) -> JobRecord | None:
        """The job with this id, live or archived; None when there is none.

        From async code: `await session.run_sync(jobs.find, job_id)`. Raises `ConfigurationError` for what is
        no session, or no id.
        """
        if not isinstance(session, (Session, scoped_session, Connection)):
            raise ConfigurationError(
                f"jobs.find takes a Session or a Connection, got {type(session).__name__}; "
                "from async code: await session.run_sync(jobs.find, job_id)"
            )
        if not isinstance(job_id, int) or isinstance(job_id, bool):
            raise ConfigurationError(f"jobs.find takes the id of a job, an int, got {job_id!r}")
        if not -(2**63) <= job_id < 2**63:
            return None  # no row has it, and the database would end the caller's transaction
        return store_find.find(session, self.tables, job_id)
