"""Arguments to JSON text and back, as the handler's annotations say; what would change is refused.

What is accepted comes back equal and of the same type, also after jsonb has rewritten its numbers. On purpose
not so: an int under `float` arrives as a float, -0.0 without its sign, an aware datetime with its offset but
not its zone's name, a subclass of UUID or datetime (drivers and clock fakes have them) as the plain class.
Knows no mapped class: hooks bring those in. Shows no text value in a message: payloads may be secret.
"""

import base64
import inspect
import json
import math
import operator
import re
import sys
import types
import typing
from collections import abc
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, InitVar, dataclass, fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, Flag
from typing import Annotated, Any, Final, Literal, NoReturn, Protocol, TypeAlias, Union, get_args, get_origin
from uuid import UUID

from sqla_jobs.errors import ArgumentError, PayloadError, TaskDefinitionError

__all__ = ["Converter", "Encoded", "Hook", "Json", "Load", "Parameters", "Reference", "check_signature"]
__all__ += ["converter"]

LIMIT = 256 * 1024  # bytes of JSON text in UTF-8, for all arguments of a job
DEPTH = 200  # levels of nesting; also what stops a list that contains itself

Json: TypeAlias = Union[bool, int, float, str, "list[Json]", "dict[str, Json]", None]
# Loads an entity by its class and identity; what it raises passes through.
Load: TypeAlias = Callable[[type, object], object]


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """A leaf that stands for an entity until its identity is known."""

    entity: object
    path: str


class Converter(Protocol):
    """How the values of one annotation travel; refuses with PayloadError."""

    def encode(self, value: object, path: str) -> Json | Reference:
        """What to store, or a Reference for `Encoded.text` to replace."""

    def decode(self, value: Json, path: str, load: Load) -> object:
        """The value for the handler, from what is stored."""


# Asked first about every annotation, at any depth; None: not mine.
Hook: TypeAlias = Callable[[Any], Converter | None]

# Where we are: (parent, key, depth). Rendered only when needed: text would cost more than the conversion.
_At: TypeAlias = tuple[Any, object, int]
_Way: TypeAlias = Callable[[Any, _At, Load], Any]  # both directions have one shape; encoding ignores `load`
_Kinds: TypeAlias = frozenset[type]
_NO_KINDS: _Kinds = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class _Codec:
    name: str
    encode: _Way
    decode: _Way
    kinds: _Kinds  # JSON types that it stores
    types: _Kinds = _NO_KINDS  # Python types that a union offers to it first
    takes_all: _Kinds = (
        _NO_KINDS  # JSON types of which it decodes every value: in a union, none comes after it
    )
    alone: bool = False  # what it stores is not known here: in a union only None may stand beside it


class _Unsupported(Exception):
    """An annotation that nothing here can carry."""


class _Untried(Exception):
    """A trial met an entity, which cannot be loaded at the call."""


# -- messages


def _path(at: _At | None) -> str:
    steps = []
    while at is not None:
        steps.append(at[1])
        at = at[0]
    text = f"{steps.pop()}{''.join(map(_step, reversed(steps)))}"
    return text if len(text) <= 200 else f"{text[:120]} ... {text[-70:]}"


def _step(key: object) -> str:
    if type(key) is not str:
        return f"[{key}]" if type(key) is int and key.bit_length() <= 64 else f"[{_about(key)}]"
    return f".{key}" if key.isidentifier() and len(key) <= 40 else f"[{key[:40]!a}]"


def _named(annotation: object) -> str:
    plain = isinstance(annotation, type) and not get_args(annotation)
    return str(getattr(annotation, "__qualname__", "?") if plain else annotation).replace("typing.", "")[:80]


def _about(value: Any) -> str:
    kind = type(value)
    if value is None or kind is bool:
        return str(value)
    if kind is float or (kind is int and abs(value) < 2**64):
        return f"{kind.__name__} {value}"
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")[:80]


def _refuse(at: _At, problem: str) -> NoReturn:
    path = _path(at)
    raise PayloadError(f"{path}: {problem}", path=path) from None  # a cause would quote the value


def _wrong(at: _At, expected: str, value: object) -> NoReturn:
    problem = f"expected {expected}, got {_about(value)}"
    if (
        isinstance(value, str | int | float | list | dict | tuple | set)
        and type(value).__module__ != "builtins"
    ):
        problem += f"; pass a plain {expected}, or annotate the parameter with {type(value).__qualname__}"
    _refuse(at, problem)


def _too_large(size: int) -> str:
    return f"the payload takes {size:,} bytes, the limit is {LIMIT:,}; store the content and pass its key"


# -- JSON text


def _constant(_: str) -> NoReturn:
    raise ValueError("NaN and infinities are not JSON")


def _as_jsonb(text: str) -> Any:
    # jsonb keeps numbers as numeric: Python's 1e+16 comes back as 10000000000000000, an int
    return int(Decimal(text)) if "e+" in text else float(text)


def _untried(*_: object) -> NoReturn:
    raise _Untried


def _dumper(default: Callable[[Any], Any]) -> Callable[[object], str]:
    compact = (",", ":")
    return json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=compact, default=default).encode


_dump = _dumper(_untried)
_loads = json.JSONDecoder(parse_constant=_constant).decode
_loads_as_jsonb = json.JSONDecoder(parse_float=_as_jsonb).decode


def _trial(encoded: object, decode: _Way, at: _At) -> Any:
    """What the handler would get; _Untried if that takes an entity."""
    return decode(_loads_as_jsonb(_dump(encoded)), at, _untried)


# -- JSON's own types


def _exactly(name: str, *accepted: type) -> _Way:
    def check(value: Any, at: _At, load: Load) -> Any:
        return value if type(value) in accepted else _wrong(at, name, value)

    return check


def _write_str(value: Any, at: _At, load: Load) -> str:
    if type(value) is not str:
        _wrong(at, "str", value)
    if len(value) > LIMIT:
        _refuse(at, _too_large(len(value)))
    if "\x00" in value:
        _refuse(at, "U+0000 in a text, which PostgreSQL cannot store; remove it, or annotate and pass bytes")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            _refuse(
                at, "a lone surrogate in a text, which is not UTF-8; replace it, or annotate and pass bytes"
            )
    return value


def _write_int(value: Any, at: _At, load: Load) -> int:
    if type(value) is not int and type(value) is not bool:
        _wrong(at, "int", value)
    if value.bit_length() > 13_000:  # Python parses 4,300 digits by default
        _refuse(at, "an int of more than 3,900 digits would not be read back; annotate and pass bytes")
    return value


def _write_float(value: Any, at: _At, load: Load) -> float:
    number = _read_float(value, at, load)
    if number != value:
        _refuse(at, f"{_about(value)} is not exact as a float; annotate the parameter `int`")
    return number


def _read_float(value: Any, at: _At, load: Load) -> float:
    if type(value) is not float and type(value) is not int:
        _wrong(at, "float", value)
    with suppress(OverflowError):
        if math.isfinite(number := float(value)):
            return number
    return _refuse(
        at, f"{_about(value)} is no finite float and JSON has no other; pass None (`float | None`)"
    )


def _write_any_float(value: Any, at: _At, load: Load) -> float:
    if 1e16 <= abs(value) < math.inf:  # equal as an int is not good enough, nor always true: 1e23 != 10**23
        _refuse(at, f"{_about(value)} would come back from jsonb as an int; annotate the parameter `float`")
    return _write_float(value, at, load)


def _write_key(key: Any, at: _At, load: Load) -> str:
    if type(key) is not str:
        _refuse(at[0], f"a key is {_about(key)}, JSON keys are text; annotate the keys (`dict[int, ...]`)")
    return _write_str(key, at, load)


def _enter(at: _At) -> int:
    if at[2] >= DEPTH:
        _refuse(at, f"nested deeper than {DEPTH} levels, or contains itself; flatten it")
    return at[2] + 1


def _copier(write_float: _Way) -> _Way:
    """Copies natives: what the caller changes afterwards must not reach a flush that comes later."""

    def write(value: Any, at: _At, load: Load) -> Any:
        kind = type(value)
        if kind is str:
            return _write_str(value, at, load)
        if kind is int:
            return _write_int(value, at, load)
        if value is None or kind is bool:
            return value
        if kind is float:
            return write_float(value, at, load)
        if kind is list:
            depth = _enter(at)
            return [write(item, (at, i, depth), load) for i, item in enumerate(value)]
        if kind is dict:
            depth, out = _enter(at), {}
            for key, item in value.items():
                here = (at, key, depth)
                out[_write_key(key, here, load)] = write(item, here, load)
            return out
        problem = "would not come back the same; annotate the parameter with its type, or pass a JSON value"
        return _refuse(at, f"{_about(value)} {problem}")

    return write


def _native(cls: type, encode: _Way, decode: _Way) -> _Codec:
    only = frozenset({cls})
    return _Codec(cls.__name__, encode, decode, only, only, only)


_NULL = type(None)
_ALL: _Kinds = frozenset({str, int, float, bool, list, dict, _NULL})
_ANY = _Codec("Any", _copier(_write_any_float), lambda value, at, load: value, _ALL, takes_all=_ALL)
# What a model or a hook made: its own decoder knows which numbers are floats.
_write_dumped = _copier(_write_float)
_DUMPED = _Codec("JSON", _write_dumped, _ANY.decode, _ALL)
_STR = _native(str, _write_str, _exactly("str", str))
_INT = _native(int, _write_int, _exactly("int", int, bool))


# -- types that travel as another


def _via(
    inner: _Codec,
    cls: type,
    take: Callable[[Any], Any],
    make: Callable[[Any], Any],
    *,
    problem: Callable[[Any], str] = lambda value: "",
    subclasses: bool = False,
    same: Callable[[Any, Any], bool] | None = None,
    fails: type[Exception] = ValueError,
    kinds: _Kinds | None = None,
) -> _Codec:
    """`take` makes of a `cls` what `inner` carries, `make` the reverse.

    `problem` says why a value is no good, in both directions; `same`, where user code takes part, is asked at
    the call whether what the handler would get is the value.
    """
    name = cls.__qualname__

    def attempt(step: Callable[[Any], Any], value: Any, at: _At) -> Any:
        try:
            return step(value)
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, fails) as failure:
            problem = f"no {name} can be made of or into this {_about(value)} ({type(failure).__name__})"
            return _refuse(at, problem)

    def encode(value: Any, at: _At, load: Load) -> Any:
        exact = type(value) is cls
        if not exact and not (subclasses and isinstance(value, cls)):
            _wrong(at, name, value)
        if trouble := problem(value):
            _refuse(at, trouble)
        encoded = inner.encode(attempt(take, value, at), at, load)
        alike = same if exact else operator.eq
        with suppress(_Untried):
            if alike is not None and not alike(_trial(encoded, decode, at), value):
                _refuse(at, f"{_about(value)} would not come back equal; pass a plain {name}, or its parts")
        return encoded

    def decode(value: Any, at: _At, load: Load) -> Any:
        made = attempt(make, inner.decode(value, at, load), at)
        if trouble := problem(made):
            _refuse(at, trouble)
        return made

    return _Codec(name, encode, decode, inner.kinds if kinds is None else kinds, frozenset({cls}))


def _write_timedelta(value: timedelta) -> str:
    seconds, rest = divmod(abs(value), timedelta(seconds=1))
    return f"{'-' if value.days < 0 else ''}PT{seconds}.{rest.microseconds:06}S"


def _read_timedelta(text: str) -> timedelta:
    match = re.fullmatch(r"(-?)PT([0-9]{1,14})(?:\.([0-9]{1,6}))?S", text)
    if match is None:
        raise ValueError
    sign, seconds, fraction = match.groups("")
    return timedelta(seconds=int(sign + seconds), microseconds=int(f"{sign}{fraction:0<6}"))


def _naive(value: datetime) -> str:
    offset = value.utcoffset()
    if offset is None:
        return "a naive datetime names no instant; pass datetime.now(UTC), or give it a tzinfo"
    return "an offset with a fraction of a second; pass it in UTC" if offset.microseconds else ""


def _zoned(value: time) -> str:
    zoned = value.tzinfo is not None
    return "a time with a zone has no date to fix its offset; pass an aware datetime" if zoned else ""


def _not_finite(value: Decimal) -> str:
    return "" if value.is_finite() else "a Decimal that is not finite; pass None (`Decimal | None`)"


def _write_bytes(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _read_bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_PLAIN: dict[object, _Codec] = {
    **dict.fromkeys((Any, object, inspect.Parameter.empty), _ANY),
    str: _STR,
    int: _INT,
    float: _native(float, _write_float, _read_float),
    bool: _native(bool, _exactly("bool", bool), _exactly("bool", bool)),
    _NULL: _native(_NULL, _exactly("None", _NULL), _exactly("None", _NULL)),
    datetime: _via(
        _STR, datetime, datetime.isoformat, datetime.fromisoformat, problem=_naive, subclasses=True
    ),
    date: _via(_STR, date, date.isoformat, date.fromisoformat),
    time: _via(_STR, time, time.isoformat, time.fromisoformat, problem=_zoned),
    timedelta: _via(_STR, timedelta, _write_timedelta, _read_timedelta),
    UUID: _via(_STR, UUID, str, UUID, subclasses=True),
    Decimal: _via(_STR, Decimal, str, Decimal, problem=_not_finite),
    bytes: _via(_STR, bytes, _write_bytes, _read_bytes),
}


# -- containers


def _list(item: _Codec) -> _Codec:
    def way(step: _Way) -> _Way:
        def run(value: Any, at: _At, load: Load) -> Any:
            if type(value) is not list:
                _wrong(at, "list", value)
            depth = _enter(at)
            return [step(each, (at, i, depth), load) for i, each in enumerate(value)]

        return run

    only = frozenset({list})
    return _Codec("list", way(item.encode), way(item.decode), only, only, only if item is _ANY else _NO_KINDS)


def _tuple(parts: tuple[_Codec, ...]) -> _Codec:
    def way(steps: list[_Way]) -> _Way:
        def run(value: Any, at: _At, load: Load) -> Any:
            if type(value) is not list or len(value) != len(steps):
                _wrong(at, f"{len(steps)} items", value)
            depth = _enter(at)
            return [step(value[i], (at, i, depth), load) for i, step in enumerate(steps)]

        return run

    encode, decode = way([part.encode for part in parts]), way([part.decode for part in parts])
    return _via(_Codec("list", encode, decode, frozenset({list})), tuple, list, tuple)


def _sorted(values: Any) -> list[Any]:
    """The same set, the same text, if its members have an order."""
    try:
        return sorted(values)
    except TypeError:
        return list(values)


def _mapping(key: _Codec, item: _Codec, name: str) -> _Codec:
    if key.kinds != {str} and key.kinds != {int}:
        raise _Unsupported(f"the keys of {name} are neither all text nor all int in JSON")
    numbers = key.kinds == {int}

    def write_key(each: Any, at: _At, load: Load) -> str:
        stored = key.encode(each, at, load)
        return str(stored) if type(stored) is not bool else _wrong(at, "int", each)

    def read_key(text: Any, at: _At, load: Load) -> Any:
        if numbers and not re.fullmatch("0|-?[1-9][0-9]{0,4000}", text):
            _wrong(at, "an int as key", text)
        return key.decode(int(text) if numbers else text, at, load)

    def way(step_key: _Way, step: _Way) -> _Way:
        def run(value: Any, at: _At, load: Load) -> dict[Any, Any]:
            if type(value) is not dict:
                _wrong(at, "dict", value)
            depth, out = _enter(at), {}
            for each, content in value.items():
                here = (at, each, depth)
                if (done := step_key(each, here, load)) in out:
                    _refuse(here, "two keys are one in JSON; keep one of them")
                out[done] = step(content, here, load)
            return out

        return run

    only = frozenset({dict})
    whole = only if key is _STR and item is _ANY else _NO_KINDS
    return _Codec(name, way(write_key, item.encode), way(read_key, item.decode), only, only, whole)


def _object(members: Mapping[str, _Codec], required: abc.Set[str], name: str) -> _Codec:
    def way(steps: dict[str, _Way]) -> _Way:
        def run(value: Any, at: _At, load: Load) -> dict[str, Any]:
            if type(value) is not dict:
                _wrong(at, name, value)
            depth, out = _enter(at), {}
            for field, content in value.items():
                here = (at, field, depth)
                if field not in steps:
                    _refuse(here, f"{name} has no such field")
                out[field] = steps[field](content, here, load)
            if not required <= out.keys():
                _refuse(at, f"{name} lacks {', '.join(sorted(required - out.keys()))}")
            return out

        return run

    encode = way({field: codec.encode for field, codec in members.items()})
    decode = way({field: codec.decode for field, codec in members.items()})
    return _Codec(name, encode, decode, frozenset({dict}), frozenset({dict}))


# -- annotations: the natural place to cut this module in two


def _enum(cls: type[Enum]) -> _Codec:
    """By value if every value is a str or an int, else by name; flags by their int."""
    if issubclass(cls, Flag):
        return _via(_INT, cls, lambda member: member.value, cls)
    by_value = all(type(member.value) in (str, int) for member in cls)
    members = {member.value if by_value else member.name: member for member in cls}
    kinds = frozenset(map(type, members))
    inner = _ANY if len(kinds) != 1 else _INT if int in kinds else _STR
    return _via(inner, cls, lambda m: m.value if by_value else m.name, members.__getitem__, kinds=kinds)


def _literal(values: tuple[Any, ...], codec: Callable[[Any], _Codec], name: str) -> _Codec:
    stored = [codec(type(value)).encode(value, (None, name, 0), _untried) for value in values]
    there = {(type(value), value): text for value, text in zip(values, stored, strict=True)}
    back = {(type(text), text): value for value, text in zip(values, stored, strict=True)}
    if len(there) != len(back):
        raise _Unsupported(f"two values of {name} are one in JSON")

    def way(table: dict[Any, Any]) -> _Way:
        known = frozenset(kind for kind, _ in table)

        def run(value: Any, at: _At, load: Load) -> Any:
            found = type(value) in known and (type(value), value) in table
            return table[type(value), value] if found else _wrong(at, "one of the literals", value)

        return run

    return _Codec(name, way(there), way(back), frozenset(map(type, stored)), frozenset(map(type, values)))


def _outside(found: Converter, name: str) -> _Codec:
    def encode(value: Any, at: _At, load: Load) -> Any:
        made = found.encode(value, _path(at))
        return made if type(made) is Reference else _write_dumped(made, at, load)

    def decode(value: Any, at: _At, load: Load) -> Any:
        return found.decode(value, _path(at), load)

    return _Codec(name, encode, decode, _ALL, alone=True)


def _optional(codec: _Codec) -> _Codec:
    def way(step: _Way) -> _Way:
        return lambda value, at, load: None if value is None else step(value, at, load)

    kinds, whole, name = codec.kinds | {_NULL}, codec.takes_all | {_NULL}, f"{codec.name} | None"
    return _Codec(name, way(codec.encode), way(codec.decode), kinds, codec.types, whole, codec.alone)


def _union(members: tuple[_Codec, ...], name: str) -> _Codec:
    """Told apart by JSON type first, then by order; a value that would come back as another's is refused."""
    taken = _NO_KINDS
    for member in members:
        if member.alone:
            raise _Unsupported(f"in a union, only None can be told from {member.name}; take the others out")
        if member.kinds <= taken:
            raise _Unsupported(f"in {name}, {member.name} would never come back; put it first")
        taken |= member.takes_all
    stored = [member.kinds | ({int} if float in member.kinds else _NO_KINDS) for member in members]
    apart = sum(map(len, stored)) == len(_NO_KINDS.union(*stored))
    order = {kind: sorted(members, key=lambda member: kind not in member.kinds) for kind in _ALL}

    def pick(value: Any, at: _At, load: Load) -> tuple[_Codec, Any]:
        for member in order[type(value)]:
            with suppress(PayloadError):
                return member, member.decode(value, at, load)
        return _wrong(at, name, value)

    def survives(encoded: Any, member: _Codec, at: _At) -> bool:
        with suppress(_Untried):
            return _trial(encoded, pick, at)[0] is member  # then that member's own promise holds
        return False

    def encode(value: Any, at: _At, load: Load) -> Any:
        kind, reason = type(value), None
        for member in sorted(members, key=lambda member: kind not in member.types):
            try:
                encoded = member.encode(value, at, load)
            except PayloadError as error:
                reason = reason or (error if kind in member.types else None)
                continue
            if not apart and not survives(encoded, member, at):
                _refuse(
                    at, f"as JSON this {_about(value)} is taken for another of {name}; wrap it in a dataclass"
                )
            return encoded
        if reason is not None:
            raise reason
        return _wrong(at, name, value)

    own = _NO_KINDS.union(*(member.types for member in members))
    return _Codec(name, encode, lambda *given: pick(*given)[1], _NO_KINDS.union(*stored), own, taken)


_LISTS = (list, abc.Sequence, abc.MutableSequence, abc.Collection, abc.Iterable)
_SETS = {set: set, abc.Set: set, abc.MutableSet: set, frozenset: frozenset}
_DICTS = (dict, abc.Mapping, abc.MutableMapping)


class _Compiler:
    """Annotations to codecs; a class or an alias that contains itself finds the codec under way."""

    def __init__(self, hooks: Sequence[Hook], names: Mapping[str, object]) -> None:
        self.hooks, self.names = hooks, names
        self.known: dict[object, _Codec] = {}

    def hints(self, owner: Any, scope: dict[str, Any]) -> dict[str, Any]:
        """Late, so that what is defined further down exists; `names` stand in for TYPE_CHECKING imports."""
        given = None if isinstance(owner, type) else scope
        try:
            return typing.get_type_hints(owner, given, include_extras=True)
        except NameError:
            absent = {name: value for name, value in self.names.items() if name not in scope}
            return typing.get_type_hints(owner, given, absent, include_extras=True)

    def codec(self, annotation: Any) -> _Codec:
        name, origin, args = _named(annotation), get_origin(annotation), get_args(annotation)
        for hook in self.hooks:
            if (found := hook(annotation)) is not None:
                return _outside(found, name)
        if origin is Annotated or origin is Final:
            return self.codec(args[0])
        if origin is Literal:
            return _literal(args, self.codec, name)
        if origin is Union or origin is types.UnionType:
            members = tuple(self.codec(each) for each in args if each is not _NULL)
            united = members[0] if len(members) == 1 else _union(members, name)
            return _optional(united) if _NULL in args else united
        if origin is None and annotation in _PLAIN:
            return _PLAIN[annotation]
        if isinstance(annotation, typing.TypeVar):
            return _ANY
        if hasattr(annotation, "__supertype__"):
            return self.codec(annotation.__supertype__)
        return self.container(origin or annotation, args, name) or self.once(annotation, origin, args, name)

    def container(self, origin: Any, args: tuple[Any, ...], name: str) -> _Codec | None:
        if origin in _LISTS:
            return _list(self.codec(*args or (Any,)))
        if origin in _SETS:
            return _via(_list(self.codec(*args or (Any,))), _SETS[origin], _sorted, _SETS[origin])
        if origin is tuple and (not args or args[-1] is Ellipsis):
            return _via(_list(self.codec(args[0] if args else Any)), tuple, list, tuple)
        if origin is tuple:
            return _tuple(tuple(map(self.codec, args)))
        if origin in _DICTS:
            key, item = args or (str, Any)
            return _mapping(self.codec(str if key is Any else key), self.codec(item), name)
        return None

    def once(self, annotation: Any, origin: Any, args: tuple[Any, ...], name: str) -> _Codec:
        if annotation not in self.known:
            cell: list[_Codec] = []

            def encode(value: Any, at: _At, load: Load) -> Any:
                return cell[0].encode(value, at, load)

            def decode(value: Any, at: _At, load: Load) -> Any:
                return cell[0].decode(value, at, load)

            self.known[annotation] = _Codec(name, encode, decode, _ALL)
            cell.append(self.structure(annotation, origin or annotation, args, name))
            self.known[annotation] = cell[0]
        return self.known[annotation]

    def structure(self, annotation: Any, cls: Any, args: tuple[Any, ...], name: str) -> _Codec:
        if type(cls).__name__ == "TypeAliasType":
            owner = types.SimpleNamespace(__annotations__={name: cls.__value__})
            return self.codec(_filled(self.hints(owner, _scope(cls))[name], cls.__type_params__, args))
        if isinstance(cls, type) and issubclass(cls, Enum):
            return _enum(cls)
        if hasattr(cls, "model_validate_json") and hasattr(cls, "model_dump"):
            return _pydantic(cls)
        if hasattr(cls, "__struct_fields__"):
            return _msgspec(cls, annotation)
        typed_dict = hasattr(cls, "__required_keys__")
        if not isinstance(cls, type) or not (
            is_dataclass(cls) or typed_dict or hasattr(cls, "_field_defaults")
        ):
            raise _Unsupported("nothing here can carry it; pass its identity, or its parts as a dataclass")
        try:
            hints = self.hints(cls, _scope(cls))
        except NameError as error:
            raise _Unsupported(f"in {name}, {error}") from error
        free = getattr(cls, "__parameters__", ())
        hints = {field: _filled(hint, free, args) for field, hint in hints.items()}
        return self.typed_dict(cls, hints) if typed_dict else self.fields(cls, hints)

    def typed_dict(self, cls: Any, hints: dict[str, Any]) -> _Codec:
        members, required = {}, set(cls.__required_keys__)
        for field, hint in hints.items():
            while getattr(get_origin(hint), "_name", "") in ("Required", "NotRequired", "ReadOnly"):
                if get_origin(hint) is typing.Required:  # __required_keys__ is wrong where these were quoted
                    required.add(field)
                elif get_origin(hint) is typing.NotRequired:
                    required.discard(field)
                hint = get_args(hint)[0]
            members[field] = self.codec(hint)
        return _object(members, required, cls.__qualname__)

    def fields(self, cls: Any, hints: dict[str, Any]) -> _Codec:
        """Of a dataclass or a NamedTuple."""
        if any(isinstance(hint, InitVar) for hint in hints.values()):
            raise _Unsupported(f"{cls.__qualname__} has an InitVar, which its instances do not give back")
        trusted, late, names = False, set[str](), list(getattr(cls, "_fields", ()))
        required = set(names) - getattr(cls, "_field_defaults", {}).keys()
        if options := getattr(cls, "__dataclass_params__", None):
            trusted = options.init and not hasattr(cls, "__post_init__")
            late = {field.name for field in fields(cls) if not field.init}
            names = [field.name for field in fields(cls)]
            required = {f.name for f in fields(cls) if f.init and f.default is f.default_factory is MISSING}
        inner = _object(
            {name: self.codec(hints.get(name, Any)) for name in names}, required, cls.__qualname__
        )

        def take(value: Any) -> dict[str, Any]:
            return {field: getattr(value, field) for field in names}

        def make(content: dict[str, Any]) -> Any:
            made = cls(**{field: value for field, value in content.items() if field not in late})
            for field in late & content.keys():
                object.__setattr__(made, field, content[field])  # frozen ones too
            return made

        def same(again: Any, value: Any) -> bool:
            one, other = (_dump(inner.encode(take(each), (None, "", 0), _untried)) for each in (again, value))
            return one == other or bool(again == value)  # without the text, eq=False would never be the same

        return _via(inner, cls, take, make, same=None if trusted else same)


def _scope(cls: Any) -> dict[str, Any]:
    return getattr(sys.modules.get(cls.__module__), "__dict__", {})


def _filled(hint: Any, parameters: Sequence[Any], args: Sequence[Any]) -> Any:
    """The hint with its type variables replaced; those without a value become Any."""
    table = dict(zip(parameters, args, strict=False))
    if isinstance(hint, typing.TypeVar):
        return table.get(hint, Any)
    free = () if isinstance(hint, type) else getattr(hint, "__parameters__", ())
    return hint[tuple(table.get(each, Any) for each in free)] if free else hint


def _pydantic(cls: Any) -> _Codec:
    def take(value: Any) -> Any:
        return value.model_dump(mode="json", by_alias=True, round_trip=True)

    def make(stored: Any) -> Any:
        return cls.model_validate_json(_dump(stored))

    kinds = _ALL - {_NULL} if getattr(cls, "__pydantic_root_model__", False) else frozenset({dict})
    return _via(_DUMPED, cls, take, make, same=operator.eq, kinds=kinds)


def _msgspec(cls: Any, annotation: Any) -> _Codec:
    msgspec: Any = sys.modules["msgspec"]  # whoever defined a Struct has loaded it

    def take(value: Any) -> Any:
        return msgspec.to_builtins(value, str_keys=True)

    def make(stored: Any) -> Any:
        return msgspec.convert(stored, annotation, str_keys=True)

    kinds = frozenset({list if cls.__struct_config__.array_like else dict})
    return _via(_DUMPED, cls, take, make, same=operator.eq, fails=msgspec.MsgspecError, kinds=kinds)


# -- for the rest of the house


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

    __slots__ = ("_decoders", "_encoders", "_positional", "_required", "signature", "task")

    def __init__(self, task: str, codecs: dict[str, _Codec], parameters: Sequence[inspect.Parameter]) -> None:
        self.task = task
        self.signature = f"{task.rpartition('.')[2]}{_shown(parameters)}"
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
