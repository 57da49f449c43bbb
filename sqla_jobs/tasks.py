"""Functions that may become jobs: `Jobs`, its `task` decorator, and `enqueue`.

A Task knows its kind, its options and how its arguments travel; it writes nothing (outbox does) and
runs nothing (worker does). Called directly, it is the function it was made of.
"""

import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import update_wrapper
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Self,
    TypeVar,
    get_args,
    get_origin,
    overload,
)

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session, scoped_session

from sqla_jobs import outbox
from sqla_jobs.context import JobContext
from sqla_jobs.core.call import LONGEST, Call, Options, check_name
from sqla_jobs.core.payload import Converter, Parameters, check_signature
from sqla_jobs.core.results import Results
from sqla_jobs.core.retention import Retention
from sqla_jobs.core.retry import Retry
from sqla_jobs.errors import ConfigurationError, DuplicateTask, TaskDefinitionError
from sqla_jobs.models import JobMixin, Tables, job_model, tables_of
from sqla_jobs.outbox import AnySession, Enqueued
from sqla_jobs.store import find as store_find
from sqla_jobs.store.find import JobRecord

__all__ = ["Jobs", "Task", "enqueue"]

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=JobContext[Any])
#: Given the context of an attempt, it returns what surrounds the handler.
Middleware = Callable[[JobContext[Any]], AbstractContextManager[Any]]


class Task(Generic[P]):
    """A function that may become a job. Made by `Jobs.task`; call it directly in tests.

    `kind` is its name in the database, `is_async` whether it is a coroutine function.
    """

    def __init__(
        self,
        jobs: "Jobs",
        function: Callable[..., Any],
        *,
        kind: str,
        aliases: tuple[str, ...],
        options: Options,
        retry: Retry,
        timeout: timedelta | None = None,
        store_result: bool = False,
    ) -> None:
        update_wrapper(self, function)  # type: ignore[arg-type]
        self.jobs = jobs
        self.function = function
        self.kind = kind
        self.aliases = aliases
        self.options = options
        self.retry = retry
        self.timeout = timeout
        self.store_result = store_result
        self.is_async = inspect.iscoroutinefunction(function)
        self.takes_context = _context_kind(function) is not None
        self._parameters: Parameters | None = None
        self._results: Results | None = None
        self._takes_entities = False

    def __repr__(self) -> str:
        return f"<Task {self.kind}>"

    def __reduce__(self) -> str:
        # by name, as functions are pickled: the decorator has rebound it
        return self.function.__qualname__

    @property
    def parameters(self) -> Parameters:
        """How its arguments travel. Compiled at the first use: annotations may name what comes later."""
        if self._parameters is None:
            self._parameters = Parameters.of(
                self.function,
                skip_first=self.takes_context,
                hooks=(self._entity_hook,),
                localns=_mapped_names(self.jobs.Job),
            )
        return self._parameters

    @property
    def results(self) -> Results:
        """How what it returns is stored, if `store_result` says so."""
        if self._results is None:
            self._results = Results.of(self.function, localns=_mapped_names(self.jobs.Job))
        return self._results

    @property
    def takes_entities(self) -> bool:
        """Whether an argument is a mapped instance, which the worker loads through the handler's session."""
        return bool(self.parameters) and self._takes_entities

    def _entity_hook(self, annotation: object) -> Converter | None:
        converter = outbox.entity_hook(annotation)
        self._takes_entities = self._takes_entities or converter is not None
        return converter

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call:
        """This call, with its arguments encoded.

        Raises `ArgumentError` when they do not fit the signature, `PayloadError` when one cannot travel.
        """
        return Call(self.kind, self.parameters.encode(args, kwargs), self.options)

    def using(
        self,
        *,
        queue: str | None = None,
        priority: int | None = None,
        delay: timedelta | None = None,
        run_at: datetime | None = None,
        expires: timedelta | datetime | None = None,
        max_attempts: int | None = None,
        tags: Iterable[str] | None = None,
        ordering_key: str | None = None,
    ) -> Self:
        """The same task with other options, for one `enqueue`.

        `delay` counts from the moment of the INSERT; `run_at` needs a time zone; a job that is not
        claimed by `expires` is cancelled. Raises `ConfigurationError` for a value that cannot work.

        >>> jobs = Jobs()
        >>> @jobs.task(name="ping")
        ... def ping() -> None: ...
        >>> ping.using(delay=timedelta(minutes=5)).options.delay
        datetime.timedelta(seconds=300)
        """
        if ordering_key is not None:
            raise ConfigurationError(
                f"ordering_key={ordering_key!r}: this release does not run jobs with an ordering key yet; "
                "leave it out"
            )
        given = {
            "queue": queue,
            "priority": priority,
            "delay": delay,
            "run_at": run_at,
            "expires": expires,
            "max_attempts": max_attempts,
            "tags": None if tags is None else _texts("tags", tags),
        }
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__, options=replace(self.options, **changes))
        return twin


class PlainTask(Task[P], Generic[P, R]):
    """A task whose handler takes no context."""

    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    else:

        def __call__(self, *args, **kwargs):
            """Run the function here and now, without a job."""
            return self.function(*args, **kwargs)


class ContextTask(Task[P], Generic[C, P, R]):
    """A task whose handler takes a context first; `enqueue` leaves it out."""

    if TYPE_CHECKING:

        def __call__(self, ctx: C, /, *args: P.args, **kwargs: P.kwargs) -> R: ...

    else:

        def __call__(self, ctx, /, *args, **kwargs):
            """Run the function here and now, without a job."""
            return self.function(ctx, *args, **kwargs)


class _Decorator:
    """What `Jobs.task(...)` with options returns."""

    def __init__(self, make: Callable[[Callable[..., Any]], Task[Any]]) -> None:
        self._make = make

    @overload
    def __call__(self, function: Callable[Concatenate[C, P], R], /) -> ContextTask[C, P, R]: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def __call__(self, function: Callable[P, R], /) -> PlainTask[P, R]: ...
    def __call__(self, function: Callable[..., Any], /) -> Any:
        return self._make(function)


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
        self.imports = _texts("imports", imports)
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
    ) -> _Decorator: ...
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
    ) -> Any:
        """Make a function a task: `@jobs.task` or `@jobs.task(queue="mail", retry=Retry(max_attempts=8))`.

        Its kind is `module.function` unless `name` says otherwise; `aliases` are older names under which
        jobs may still wait. A first parameter annotated `JobContext` (`AsyncJobContext` for an
        `async def`) is handed in by the worker.

        `timeout` limits an attempt: a coroutine is cancelled at its limit and the attempt has failed. A
        thread cannot be stopped: `ctx.cancelled` turns true, the job keeps its lease, and when it still
        runs one more `timeout` later the worker ends its other jobs and exits with 7. `store_result` keeps
        what the handler returns, as JSON by its return annotation; what cannot be stored is left out.

        Raises `TaskDefinitionError` for a function that cannot be one (a method, a lambda, a partial, a
        generator, *args), `DuplicateTask` when the kind is taken, `ConfigurationError` for an option.
        """
        if not isinstance(retry, Retry):
            raise ConfigurationError(f"retry takes a Retry(...), got {retry!r}")
        _check_timeout(timeout)
        options = Options(queue=queue, priority=priority, max_attempts=retry.max_attempts)
        older = tuple(check_name("alias", alias) for alias in _texts("aliases", aliases))

        def make(function: Callable[..., Any]) -> Task[Any]:
            _check_function(function, named=name is not None)
            kind = check_name("kind", _kind_of(function) if name is None else name)
            cls: type[Task[Any]] = PlainTask if _context_kind(function) is None else ContextTask
            made = cls(
                self,
                function,
                kind=kind,
                aliases=older,
                options=options,
                retry=retry,
                timeout=timeout,
                store_result=store_result,
            )
            self._register(made)
            return made

        return _Decorator(make) if function is None else make(function)

    def _register(self, task: Task[Any]) -> None:
        for kind in (task.kind, *task.aliases):
            other = self._tasks.get(kind)
            # the same function again is a module that was reloaded
            if other is not None and not _same_place(other.function, task.function):
                raise DuplicateTask(
                    f"kind {kind!r} is taken by {other.function.__module__}.{other.function.__qualname__}; "
                    f"give {task.function.__module__}.{task.function.__qualname__} another name="
                )
        for kind in (task.kind, *task.aliases):
            self._tasks[kind] = task

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

    def find(
        self, session: "Session | scoped_session[Session] | Connection", job_id: int
    ) -> JobRecord | None:
        """The job with this id, live or archived; None when there is none.

        From async code: `await session.run_sync(jobs.find, job_id)`.
        """
        if not isinstance(session, (Session, scoped_session, Connection)):
            raise ConfigurationError(
                f"jobs.find takes a Session or a Connection, got {type(session).__name__}; "
                "from async code: await session.run_sync(jobs.find, job_id)"
            )
        return store_find.find(session, self.tables, job_id)


def enqueue(session: AnySession, task: Task[P], /, *args: P.args, **kwargs: P.kwargs) -> Enqueued:
    """Let this call run as a job when, and only when, the session's transaction commits.

    A plain call for every kind of session, also an AsyncSession: it only touches the session object.
    Arguments that cannot travel are refused here, before anything is written, and the transaction stays
    usable. A mapped instance travels as its identity; one that is still pending gets it at flush.

    Raises `ArgumentError` (the call does not fit the signature), `PayloadError` (a value cannot travel;
    says which), `ConfigurationError` (not a session, not a task).
    """
    if isinstance(session, Task):  # whoever checks no types
        raise ConfigurationError("the session comes first: enqueue(session, task, arguments)")
    if not isinstance(task, Task):
        name = getattr(task, "__qualname__", type(task).__name__)  # type: ignore[unreachable]
        raise ConfigurationError(
            f"{name} is not a task: decorate the function with @jobs.task, and pass it without calling it"
        )
    return outbox.put(session, task.jobs.Job, task.call(*args, **kwargs))


def _check_timeout(timeout: object) -> None:
    if timeout is None:
        return
    if not isinstance(timeout, timedelta) or not timedelta(0) < timeout <= LONGEST:
        raise ConfigurationError(f"timeout takes a timedelta above 0, or None, got {timeout!r}")


def _texts(what: str, given: Iterable[str]) -> tuple[str, ...]:
    if isinstance(given, str):  # an iterable of str by its type
        raise ConfigurationError(f"{what} takes several texts, got one: write [{given!r}]")
    return tuple(given)


# -- what may be a task


def _check_function(function: Any, *, named: bool) -> None:
    name = getattr(function, "__qualname__", repr(function))
    reason = _why_not(function, named=named)
    if reason is not None:
        raise TaskDefinitionError(f"{name} cannot be a task: {reason}")
    context = _context_kind(function)
    check_signature(function, skip_first=context is not None)
    is_async = inspect.iscoroutinefunction(function)
    if context == "sync" and is_async:
        raise TaskDefinitionError(
            f"{name} is an async def with a JobContext, whose session is not awaitable: "
            "annotate the first parameter AsyncJobContext"
        )
    if context == "async" and not is_async:
        raise TaskDefinitionError(
            f"{name} is a plain def with an AsyncJobContext: annotate the first parameter JobContext"
        )


def _why_not(function: Any, *, named: bool) -> str | None:
    if isinstance(function, Task):
        return "it is a task already; two kinds of one function need two functions"
    if isinstance(function, (staticmethod, classmethod)) or inspect.ismethod(function):
        return "it is a method; a job has no self: write a module-level function"
    if not inspect.isfunction(function):
        return f"it is a {type(function).__name__}, not a function: write a def that calls it"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return "it is a generator, which would do nothing when called: return a value instead"
    if inspect.iscoroutinefunction(inspect.unwrap(function)) and not inspect.iscoroutinefunction(function):
        return "it is a plain function around an async def, which would never run: make the wrapper async too"
    if function.__name__ == "<lambda>":
        return "a lambda has no name to find it by: write a def"
    outer, _, own = function.__qualname__.rpartition("<locals>.")
    if "." in own:
        return "it is defined in a class; a job has no self: write a module-level function"
    if outer and not named:
        return "it is local to another function: give it a name="
    return None


def _context_kind(function: Callable[..., Any]) -> str | None:
    """Whether the first parameter is a context: "sync", "async" or None."""
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters:
        return None
    first, *others = parameters
    if first.annotation is inspect.Parameter.empty and first.name in {"ctx", "context"}:
        raise TaskDefinitionError(
            f"{function.__qualname__}: annotate {first.name!r} with JobContext or AsyncJobContext, "
            "or call it something else if it is an argument of the job"
        )
    for other in others:
        if _context_of(other.annotation, function) is not None:
            raise TaskDefinitionError(
                f"{function.__qualname__}: {other.name!r} is a context, which must be the first parameter"
            )
    return _context_of(first.annotation, function)


def _context_of(annotation: Any, function: Callable[..., Any]) -> str | None:
    """By the annotation, or by its text where that names what exists for type checkers only."""
    scope = getattr(inspect.unwrap(function), "__globals__", {})
    with suppress(NameError, AttributeError, SyntaxError, TypeError):
        owner = types.SimpleNamespace(__annotations__={"it": annotation})
        annotation = typing.get_type_hints(owner, scope)["it"]
    if isinstance(annotation, str):
        head, _, arguments = annotation.strip("'\"").partition("[")
        name = head.rpartition(".")[2]
        if name == "AsyncJobContext" or (name == "JobContext" and "AsyncSession" in arguments):
            return "async"
        return "sync" if name == "JobContext" else None
    if annotation is not JobContext and get_origin(annotation) is not JobContext:
        return None
    session = next(iter(get_args(annotation)), None)
    return "async" if isinstance(session, type) and issubclass(session, AsyncSession) else "sync"


def _kind_of(function: Callable[..., Any]) -> str:
    return f"{_module_of(function)}.{function.__qualname__}"


def _module_of(function: Callable[..., Any]) -> str:
    """The name under which a worker will import the module, also when it runs as a script now."""
    if function.__module__ != "__main__":
        return function.__module__
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name).removesuffix(".__main__")
    path = getattr(main, "__file__", None)
    return Path(path).stem if path else "__main__"


def _same_place(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    return _kind_of(one) == _kind_of(other) and "<locals>" not in one.__qualname__


def _mapped_names(model: type[JobMixin]) -> dict[str, Any]:
    """Class names of the user's registry: annotations may name classes imported under TYPE_CHECKING."""
    registry: Any = getattr(model, "registry", None)
    if registry is None:
        return {}
    return {mapper.class_.__name__: mapper.class_ for mapper in registry.mappers}
