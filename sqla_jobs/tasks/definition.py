"""Which functions may become tasks, and under which name. Looks at functions, keeps nothing."""

import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args, get_origin

from sqlalchemy.ext.asyncio import AsyncSession

from sqla_jobs.context import JobContext
from sqla_jobs.core.call import LONGEST
from sqla_jobs.core.payload import check_signature
from sqla_jobs.errors import ConfigurationError, TaskDefinitionError
from sqla_jobs.models import JobMixin

__all__ = [
    "check_function",
    "check_timeout",
    "context_kind",
    "kind_of",
    "mapped_names",
    "same_place",
    "texts",
]


def check_function(function: Any, *, named: bool) -> None:
    """Raise `TaskDefinitionError` for what cannot be a task, with the reason and the way out."""
    name = getattr(function, "__qualname__", repr(function))
    reason = _why_not(function, named=named)
    if reason is not None:
        raise TaskDefinitionError(f"{name} cannot be a task: {reason}")
    context = context_kind(function)
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
    if getattr(function, "is_task", False):
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


def context_kind(function: Callable[..., Any]) -> str | None:
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


def kind_of(function: Callable[..., Any]) -> str:
    """`module.function`: the kind of a task that was given no name."""
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


def same_place(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Whether both are the same function, as after a reload of its module."""
    return kind_of(one) == kind_of(other) and "<locals>" not in one.__qualname__


def mapped_names(model: type[JobMixin]) -> dict[str, Any]:
    """Class names of the user's registry: annotations may name classes imported under TYPE_CHECKING."""
    registry: Any = getattr(model, "registry", None)
    if registry is None:
        return {}
    return {mapper.class_.__name__: mapper.class_ for mapper in registry.mappers}


def check_timeout(timeout: object) -> None:
    """Raise `ConfigurationError` for what is no time limit."""
    if timeout is None:
        return
    if not isinstance(timeout, timedelta) or not timedelta(0) < timeout <= LONGEST:
        raise ConfigurationError(f"timeout takes a timedelta above 0, or None, got {timeout!r}")


def texts(what: str, given: Iterable[str]) -> tuple[str, ...]:
    """Several texts; one alone is a mistake. Raises `ConfigurationError`."""
    if isinstance(given, str):  # an iterable of str by its type
        raise ConfigurationError(f"{what} takes several texts, got one: write [{given!r}]")
    return tuple(given)
