"""How values of one type travel as JSON: what goes in comes back equal and of the same type, or is refused.

Also after jsonb has rewritten its numbers. On purpose not so: an int under `float` arrives as a float, -0.0
without its sign, an aware datetime with its offset but not its zone's name, a subclass of UUID or datetime
(drivers and clock fakes have them) as the plain class. Knows annotations only one at a time:
core.payload puts them together. Shows no text value in a message: payloads may be secret.
"""

import base64
import inspect
import json
import math
import operator
import re
from collections import abc
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, NoReturn, Protocol, TypeAlias, Union, get_args
from uuid import UUID

from sqla_jobs.errors import PayloadError

__all__ = ["DEPTH", "LIMIT", "Converter", "Hook", "Json", "Load", "Reference"]

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
    name = str(getattr(annotation, "__qualname__", "?") if plain else annotation).replace("typing.", "")
    return _short(name)


def _short(name: str) -> str:
    """What a thing is called stands at the end of its full name."""
    return name if len(name) <= 80 else f"...{name[-77:]}"


def _about(value: Any) -> str:
    kind = type(value)
    if value is None or kind is bool:
        return str(value)
    if kind is float or (kind is int and abs(value) < 2**64):
        return f"{kind.__name__} {value}"
    return _short(f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."))


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
