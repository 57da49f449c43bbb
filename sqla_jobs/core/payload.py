"""Arguments to JSON text and back, as the handler's annotations say; what would change is refused.

Each annotation is compiled once, by core.codecs and the hooks that are given (mapped classes come in by one).
Knows no mapped class itself.
"""

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from sqla_jobs.core.annotations import _Compiler
from sqla_jobs.core.codecs import (
    DEPTH,
    LIMIT,
    Converter,
    Hook,
    Json,
    Load,
    Reference,
    _about,
    _Codec,
    _dump,
    _dumper,
    _loads,
    _named,
    _refuse,
    _too_large,
    _Unsupported,
    _Untried,
    _untried,
    _write_dumped,
)
from sqla_jobs.errors import ArgumentError, PayloadError, TaskDefinitionError

__all__ = ["DEPTH", "LIMIT", "Converter", "Encoded", "Hook", "Json", "Load", "Parameters", "Reference"]
__all__ += ["check_signature", "converter"]


@dataclass(frozen=True, slots=True)
class _Standard:
    """A codec as a Converter."""

    codec: _Codec

    def encode(self, value: object, path: str) -> Json | Reference:
        return self.codec.encode(value, (None, path, 0), _untried)  # type: ignore[no-any-return]

    def decode(self, value: Json, path: str, load: Load) -> object:
        return self.codec.decode(value, (None, path, 0), load)


def converter(annotation: object, *, hooks: Sequence[Hook] = ()) -> Converter:
    """How values of one annotation travel, for instance those of a primary key column.

    Raises TaskDefinitionError when nothing can carry them.
    """
    try:
        return _Standard(_Compiler(hooks, {}).codec(annotation))
    except (_Unsupported, TypeError, ValueError) as error:
        raise TaskDefinitionError(f"{_named(annotation)}: {error}") from error


class Encoded:
    """The arguments of one call, checked and copied: what the caller changes afterwards is not stored."""

    __slots__ = ("_content", "_text", "references")

    def __init__(self, content: Mapping[str, Any]) -> None:
        references: list[Reference] = []
        self._content = content
        try:
            self._text = self._render(_dump)
        except _Untried:
            self._text = self._render(_dumper(references.append))  # null for each: nearly the final size
        self.references = tuple(references)

    def text(self, identities: Callable[[Reference], Json] | None = None) -> str:
        """The JSON text, references replaced by their identities. Raises PayloadError over the limit."""
        if not self.references:
            return self._text
        if identities is None:
            raise TypeError("these arguments hold entities: text() needs their identities")
        return self._render(
            _dumper(lambda leaf: _write_dumped(identities(leaf), (None, leaf.path, 0), _untried))
        )

    def _render(self, dump: Callable[[object], str]) -> str:
        text = dump(self._content)
        size = len(text) if text.isascii() else len(text.encode())
        if size > LIMIT:
            largest = max(self._content, key=lambda name: len(dump(self._content[name])))
            _refuse((None, largest, 0), _too_large(size))
        return text


_EMPTY = inspect.Parameter.empty
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def check_signature(function: Callable[..., object], *, skip_first: bool = False) -> None:
    """Raise TaskDefinitionError unless every parameter, after a context to skip, can be given by name."""
    parameters = list(inspect.signature(function).parameters.values())
    if skip_first and (not parameters or parameters[0].kind not in _BY_POSITION):
        raise TaskDefinitionError(
            f"task {_task(function)}: its first parameter cannot take the context by position"
        )
    for parameter in parameters[skip_first:]:
        if parameter.kind not in _BY_NAME:
            way_out = (
                "remove the /" if parameter.kind in _BY_POSITION else "spell out the parameters it takes"
            )
            raise TaskDefinitionError(
                f"task {_task(function)}: {parameter.name!r} is {parameter.kind.description}, "
                f"but arguments are stored by name; {way_out}"
            )


def _task(function: Callable[..., object]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _shown(parameters: Sequence[inspect.Parameter]) -> str:
    """For people: without the values of defaults, which may be secret or have a broken repr."""
    shown = []
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        annotated = "" if parameter.annotation is _EMPTY else f": {_named(parameter.annotation)}"
        shown.append(f"{parameter.name}{annotated}{'' if parameter.default is _EMPTY else ' = ...'}")
    return f"({', '.join(shown)})"


class Parameters:
    """A handler's parameters, compiled once."""

    __slots__ = (
        "_codecs",
        "_decoders",
        "_encoders",
        "_positional",
        "_python",
        "_required",
        "signature",
        "task",
    )

    def __init__(self, task: str, codecs: dict[str, _Codec], parameters: Sequence[inspect.Parameter]) -> None:
        self.task = task
        self.signature = f"{task.rpartition('.')[2]}{_shown(parameters)}"
        self._python = inspect.Signature(parameters)
        self._codecs = codecs
        self._encoders = {name: (codec.encode, (None, name, 0)) for name, codec in codecs.items()}
        self._decoders = {name: (codec.decode, (None, name, 0)) for name, codec in codecs.items()}
        self._positional = tuple(each.name for each in parameters if each.kind in _BY_POSITION)
        self._required = frozenset(each.name for each in parameters if each.default is _EMPTY)

    @classmethod
    def of(
        cls,
        function: Callable[..., object],
        *,
        skip_first: bool,
        hooks: Sequence[Hook] = (),
        localns: Mapping[str, object] | None = None,
    ) -> "Parameters":
        """Resolve the annotations, now that everything is imported.

        `localns` stands in for names that are missing at run time. Raises TaskDefinitionError, which names
        the task, the parameter and its annotation.
        """
        check_signature(function, skip_first=skip_first)
        parameters = list(inspect.signature(function).parameters.values())[skip_first:]
        scope = getattr(inspect.unwrap(function), "__globals__", {})
        compiler, codecs = _Compiler(hooks, localns or {}), {}
        for each in parameters:
            # one by one: what annotates the context or the return value need not exist at run time
            owner = types.SimpleNamespace(__annotations__={each.name: each.annotation})
            try:
                codecs[each.name] = compiler.codec(compiler.hints(owner, scope)[each.name])
            except (_Unsupported, NameError, AttributeError, TypeError, SyntaxError, ValueError) as error:
                where = (
                    f"task {_task(function)}: parameter {each.name!r} is annotated {_named(each.annotation)}"
                )
                raise TaskDefinitionError(f"{where}: {error}") from error
        return cls(_task(function), codecs, parameters)

    def encode(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Encoded:
        """What a call stores. Defaults are not stored: those of a later deploy apply.

        Raises ArgumentError when the call does not fit, PayloadError when a value cannot travel.
        """
        content, name = {}, ""
        try:
            for name, value in self._bind(args, kwargs).items():
                way, at = self._encoders[name]
                content[name] = way(value, at, _untried)
        except RecursionError:
            _refuse((None, name, 0), "nested too deeply, or contains itself; flatten it")
        return Encoded(content)

    def bound(self, args: Sequence[object], kwargs: Mapping[str, object]) -> inspect.BoundArguments:
        """The arguments of a call that fits, with the defaults of today."""
        bound = self._python.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound

    def _bind(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, object]:
        if len(args) > len(self._positional):
            self._misfit(f"takes {len(self._positional)} positional arguments, got {len(args)}")
        given = dict(zip(self._positional, args, strict=False))
        for name, value in kwargs.items():
            if name in given:
                self._misfit(f"got {name!r} twice")
            if name not in self._encoders:
                self._misfit(f"has no parameter {name[:60]!a}")
            given[name] = value
        if not self._required <= given.keys():
            self._misfit(f"misses {', '.join(sorted(self._required - given.keys()))}")
        return given

    def _misfit(self, problem: str) -> NoReturn:
        raise ArgumentError(f"task {self.task} {problem}; call it as {self.signature}")

    def check_names(self, names: Sequence[str]) -> None:
        """Raise ArgumentError unless these are parameters, each once, and none that is required misses."""
        self._bind((), dict.fromkeys(names))
        if len(set(names)) < len(names):
            self._misfit(f"got {max(names, key=names.count)!r} twice")

    def reads(self, name: str, sample: Json) -> bool:
        """Whether the handler's decoder takes a stored value like this one for the parameter `name`."""
        try:
            self._codecs[name].decode(sample, (None, name, 0), lambda cls, identity: object())
        except PayloadError:
            return False
        return True

    def stores_text(self, name: str) -> bool:
        """Whether some text may be stored for the parameter `name`."""
        return str in self._codecs[name].kinds

    def decode(self, text: str, load: Load) -> dict[str, object]:
        """The keyword arguments for the handler. Raises PayloadError when the text does not fit it."""
        try:
            stored = _loads(text)
        except (ValueError, RecursionError) as error:
            raise PayloadError(
                f"the payload of {self.task} cannot be read ({type(error).__name__})"
            ) from None
        if type(stored) is not dict:
            raise PayloadError(
                f"the payload of {self.task} is {_about(stored)}, not an object; write at least {{}}"
            )
        given, name = {}, ""
        try:
            for name, value in stored.items():
                if name not in self._decoders:
                    _refuse(((None, "payload", 0), name, 1), f"stored, but the task is {self.signature}")
                way, at = self._decoders[name]
                given[name] = way(value, at, load)
        except RecursionError:
            _refuse((None, name, 0), "the stored value is nested too deeply")
        for name in sorted(self._required - given.keys()):
            _refuse((None, name, 0), f"not stored, but the task is {self.signature}")
        return given
