"""A function that may become a job, and the calls of it: `Task` and its forms.

Knows its kind, its options and how its arguments travel. Writes nothing (outbox does) and runs nothing
(worker does). Called directly, it is the function it was made of.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial, update_wrapper
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

from sqlalchemy import ClauseElement
from sqlalchemy import inspect as sa_inspect

from sqla_jobs import outbox
from sqla_jobs.context import JobContext
from sqla_jobs.core.call import Call, Options, check_name
from sqla_jobs.core.payload import Converter, Encoded, Parameters
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
        # compiled at the first use, for all forms of it that `using` makes: they share this
        self._compiled: dict[str, Any] = {"takes_entities": False}

    def __repr__(self) -> str:
        return f"<Task {self.kind}>"

    def __reduce__(self) -> str:
        # by name, as functions are pickled: the decorator has rebound it
        return self.function.__qualname__

    @property
    def parameters(self) -> Parameters:
        """How its arguments travel. Compiled at the first use: annotations may name what comes later."""
        found: Parameters | None = self._compiled.get("parameters")
        if found is None:
            found = self._compiled["parameters"] = Parameters.of(
                self.function,
                skip_first=self.takes_context,
                hooks=(self._entity_hook,),
                localns=mapped_names(self.jobs.Job),
            )
        return found

    @property
    def results(self) -> Results:
        """How what it returns is stored, if `store_result` says so."""
        found: Results | None = self._compiled.get("results")
        if found is None:
            names = mapped_names(self.jobs.Job)
            found = self._compiled["results"] = Results.of(self.function, localns=names)
        return found

    @property
    def takes_entities(self) -> bool:
        """Whether an argument is a mapped instance, which the worker loads through the handler's session."""
        return bool(self.parameters) and self._compiled["takes_entities"]

    def _entity_hook(self, annotation: object) -> Converter | None:
        converter = outbox.entity_hook(annotation)
        if converter is not None:
            self._compiled["takes_entities"] = True
        return converter

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call:
        """This call, with its arguments encoded.

        Raises `ArgumentError` when they do not fit the signature, `PayloadError` when one cannot travel.
        """
        encoded = self.parameters.encode(args, kwargs)
        if callable(self.unique_key):
            bound = self.parameters.bound(args, kwargs)
            args, kwargs = bound.args, bound.kwargs  # type: ignore[assignment]
        return self._call(encoded, args, kwargs)

    def _call(self, encoded: Encoded, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """With the unique key that its arguments make; later, while one of them has no identity yet."""
        key = self.unique_key
        if not callable(key):
            options = self.options if key is None else replace(self.options, unique_key=key)
            return Call(self.kind, encoded, options, self.jobs.Job)
        call = Call(
            self.kind, encoded, self.options, self.jobs.Job, partial(_made, key, self.kind, args, kwargs)
        )
        return call if outbox.has_pending(encoded.references) else call.keyed()

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
        for name, value in columns.items():
            if name in users:
                self._check_column(name, value)
                continue
            has = f"the columns of your own are {', '.join(sorted(users))}" if users else "it has none"
            if name in own_columns():
                raise ConfigurationError(f"columns: {name!r} is a column of ours: use its own option")
            raise ConfigurationError(
                f"columns: {self.jobs.Job.__name__} has no column {name!r} of your own; {has}"
            )
        return tuple(columns.items())

    def _check_column(self, name: str, value: object) -> None:
        """What would end the caller's transaction in its flush is refused here."""
        column = self.jobs.tables.jobs.c[name]
        problem = None
        if value is None and not column.nullable:
            problem = "must not be null"
        elif isinstance(value, ClauseElement) or hasattr(value, "__clause_element__"):
            problem = f"takes a value, not an expression of SQL ({type(value).__name__})"
        elif sa_inspect(value, raiseerr=False) is not None:
            problem = f"takes a value, not an entity ({type(value).__name__}): give its key"
        elif isinstance(value, str) and "\0" in value:
            problem = "holds U+0000, which PostgreSQL cannot store"
        if problem:
            raise ConfigurationError(f"columns: {name!r} of {self.jobs.Job.__name__} {problem}")


def _made(key: Callable[..., str], kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    try:
        made = key(*args, **kwargs)
    except Exception as error:
        raise ConfigurationError(
            f"the unique_key of task {kind} could not be made of its arguments: "
            f"{type(error).__name__}: {error}"
        ) from error
    return check_name("unique_key", made, longest=2000)


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
        return self._call(encoded, (), kwargs)

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
