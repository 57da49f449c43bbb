"""Arguments to JSON by their own types, for a call whose handler is not here to say what it takes. Pure.

What a handler annotated with that type would have been sent: a datetime as its text, a dataclass as an
object, a mapped instance as its key.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sqla_jobs.core.annotations import _Compiler
from sqla_jobs.core.codecs import (
    _ANY,
    Hook,
    Load,
    _about,
    _At,
    _enter,
    _refuse,
    _sorted,
    _Unsupported,
    _untried,
    _write_key,
)
from sqla_jobs.core.payload import Encoded

__all__ = ["encode_values"]

_NATIVE = frozenset({str, int, float, bool, type(None)})


def encode_values(arguments: Mapping[str, object], *, hooks: Sequence[Hook] = ()) -> Encoded:
    """What a call stores. Raises `PayloadError`, with the path, for what cannot travel.

    >>> from datetime import date
    >>> encode_values({"day": date(2026, 3, 1), "pages": (1, 2)}).text()
    '{"day":"2026-03-01","pages":[1,2]}'
    """
    compiler = _Compiler(hooks, {})
    content: dict[str, Any] = {}
    name = ""
    try:
        for name, value in arguments.items():
            content[name] = _write(compiler, value, (None, name, 0), _untried)
    except RecursionError:
        _refuse((None, name, 0), "nested too deeply, or contains itself; flatten it")
    return Encoded(content)


def _write(compiler: _Compiler, value: Any, at: _At, load: Load) -> Any:
    kind = type(value)
    if kind in _NATIVE:
        return _ANY.encode(value, at, load)
    if kind in (list, tuple, set, frozenset):
        depth = _enter(at)
        items = _sorted(value) if kind in (set, frozenset) else value
        return [_write(compiler, each, (at, i, depth), load) for i, each in enumerate(items)]
    if kind is dict:
        return _write_dict(compiler, value, at, load)
    try:
        codec = compiler.codec(kind)
    except (_Unsupported, TypeError, ValueError) as error:
        _refuse(at, f"{_about(value)}: {error}")
    return codec.encode(value, at, load)


def _write_dict(compiler: _Compiler, value: dict[Any, Any], at: _At, load: Load) -> dict[str, Any]:
    depth, out = _enter(at), {}
    for key, item in value.items():
        here = (at, key, depth)
        made = key if type(key) is str else _write(compiler, key, here, load)
        if type(made) is int:
            made = str(made)  # as an annotation dict[int, ...] stores and reads it
        name = _write_key(made, here, load)
        if name in out:
            _refuse(here, "two keys are one in JSON; keep one of them")
        out[name] = _write(compiler, item, here, load)
    return out
