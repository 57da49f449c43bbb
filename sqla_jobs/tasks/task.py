"""A function that may become a job, and the calls of it: `Task` and its forms.

Knows its kind, its options and how its arguments travel. Writes nothing (outbox does) and runs nothing
(worker does). Called directly, it is the function it was made of.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from functools import update_wrapper
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    NoReturn,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    overload,
)

from sqla_jobs import outbox
from sqla_jobs.context import JobContext
from sqla_jobs.core.call import Call, Options, check_name
from sqla_jobs.core.payload import Converter, Parameters
from sqla_jobs.core.results import Results
from sqla_jobs.core.retry import Retry
from sqla_jobs.core.values import encode_values
from sqla_jobs.errors import ArgumentError, ConfigurationError
from sqla_jobs.models import JobMixin, Tables, own_columns
from sqla_jobs.tasks.definition import context_kind, mapped_names, texts

__all__ = ["Owner", "RemoteTask", "Task", "UniqueKey"]

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=JobContext[Any])
#: A unique key, or how it is made of the arguments of a call.
UniqueKey = str | Callable[..., str]


class Owner(Protocol):
    """What a task needs of its `Jobs`."""

    Job: type[JobMixin]
    tables: Tables


class Task(Generic[P]):
    """A function that may become a job. Made by `Jobs.task`; call it directly in tests.

    `kind` is its name in the database, `is_async` whether it is a coroutine function.
    """

    is_task = True

    def __init__(
        self,
        jobs: Owner,
        function: Callable[..., Any],
        *,
        kind: str,
        aliases: tuple[str, ...],
        options: Options,
        retry: Retry,
        timeout: timedelta | None = None,
        store_result: bool = False,
        unique_key: UniqueKey | None = None,
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
        self.unique_key = unique_key
        self.is_async = inspect.iscoroutinefunction(function)
        self.takes_context = context_kind(function) is not None
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
                localns=mapped_names(self.jobs.Job),
            )
        return self._parameters

    @property
    def results(self) -> Results:
        """How what it returns is stored, if `store_result` says so."""
        if self._results is None:
            self._results = Results.of(self.function, localns=mapped_names(self.jobs.Job))
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
        encoded = self.parameters.encode(args, kwargs)
        return Call(self.kind, encoded, self._options_for(args, kwargs), self.jobs.Job)

    def _options_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Options:
        """Those of this task, with the unique key that its arguments make."""
        key = self.unique_key
        if key is None:
            return self.options
        return replace(self.options, unique_key=key(*args, **kwargs) if callable(key) else key)

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
        unique_key: UniqueKey | None = None,
        on_conflict: Literal["skip"] = "skip",
        columns: Mapping[str, object] | None = None,
        ordering_key: str | None = None,
    ) -> Self:
        """The same task with other options, for one `enqueue`.

        `delay` counts from the moment of the INSERT; `run_at` needs a time zone; a job that is not
        claimed by `expires` is cancelled. While a job of the same queue with an equal `unique_key` waits or
        runs, no second one is made: the handle then names that job. `columns` fills columns that you have
        added to your Job class. Raises `ConfigurationError` for a value that cannot work.

        >>> from sqla_jobs import Jobs
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
        check_on_conflict(on_conflict)
        given = {
            "queue": queue,
            "priority": priority,
            "delay": delay,
            "run_at": run_at,
            "expires": expires,
            "max_attempts": max_attempts,
            "tags": None if tags is None else texts("tags", tags),
            "columns": None if columns is None else self._columns(columns),
        }
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        key = self.unique_key if unique_key is None else check_unique_key(unique_key)
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__, options=replace(self.options, **changes), unique_key=key)
        return twin

    def _columns(self, columns: Mapping[str, object]) -> tuple[tuple[str, object], ...]:
        users = {column.key for column in self.jobs.tables.jobs.c} - own_columns()
        for name in columns:
            if name in users:
                continue
            has = f"the columns of your own are {', '.join(sorted(users))}" if users else "it has none"
            if name in own_columns():
                raise ConfigurationError(f"columns: {name!r} is a column of ours: use its own option")
            raise ConfigurationError(
                f"columns: {self.jobs.Job.__name__} has no column {name!r} of your own; {has}"
            )
        return tuple(columns.items())


def check_on_conflict(given: object) -> None:
    """Raise `ConfigurationError` for what is not there."""
    if given != "skip":
        raise ConfigurationError(
            f"on_conflict={given!r}: this release knows 'skip' only (an equal job that waits or runs stays)"
        )


def check_unique_key(key: UniqueKey) -> UniqueKey:
    """A text that fits, or a function of the arguments. Raises `ConfigurationError`."""
    return key if callable(key) else check_name("unique_key", key, longest=2000)


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


class RemoteTask(Task[...]):
    """A task whose handler lives in another program: arguments by keyword, as their own types travel."""

    def __init__(self, jobs: Owner, *, kind: str, options: Options, unique_key: UniqueKey | None) -> None:
        self.jobs = jobs
        self.kind = kind
        self.options = options
        self.unique_key = unique_key

    def call(self, *args: Any, **kwargs: Any) -> Call:
        """This call, with its arguments encoded.

        Raises `ArgumentError` for a positional one, `PayloadError` when one cannot travel.
        """
        if args:
            raise ArgumentError(
                f"task {self.kind} is remote, so the names of its parameters are not known here: "
                f"give its arguments by keyword, got {len(args)} without"
            )
        encoded = encode_values(kwargs, hooks=(outbox.entity_hook,))
        return Call(self.kind, encoded, self._options_for((), kwargs), self.jobs.Job)

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Not here."""
        raise TypeError(f"task {self.kind} is remote: it can be enqueued, not called")

    def __reduce__(self) -> str:
        raise TypeError(f"task {self.kind} is remote, and has no function to be found by")


class Decorator:
    """What `Jobs.task(...)` with options returns."""

    def __init__(self, make: Callable[[Callable[..., Any]], Task[Any]]) -> None:
        self._make = make

    @overload
    def __call__(self, function: Callable[Concatenate[C, P], R], /) -> ContextTask[C, P, R]: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def __call__(self, function: Callable[P, R], /) -> PlainTask[P, R]: ...
    def __call__(self, function: Callable[..., Any], /) -> Any:
        return self._make(function)
