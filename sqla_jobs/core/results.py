"""What a handler returned, as JSON text that can be stored. Pure.

By its return annotation where that says more than JSON's own types; never by trusting what it returned.
"""

import inspect
import types
from collections.abc import Callable, Mapping

from sqla_jobs.core.annotations import _Compiler
from sqla_jobs.core.codecs import _ANY, LIMIT, _Codec, _dump, _Unsupported, _Untried, _untried
from sqla_jobs.errors import PayloadError

__all__ = ["Results"]


class Results:
    """How the results of one handler are stored. Compiled once; an annotation that says nothing is Any."""

    __slots__ = ("_codec",)

    def __init__(self, codec: _Codec) -> None:
        self._codec = codec

    @classmethod
    def of(cls, function: Callable[..., object], *, localns: Mapping[str, object] | None = None) -> "Results":
        """By the function's return annotation."""
        annotation = inspect.signature(function).return_annotation
        if annotation is inspect.Signature.empty:
            return cls(_ANY)
        owner = types.SimpleNamespace(__annotations__={"return": annotation})
        scope = getattr(inspect.unwrap(function), "__globals__", {})
        compiler = _Compiler((), localns or {})
        try:
            return cls(compiler.codec(compiler.hints(owner, scope)["return"]))
        except (_Unsupported, NameError, AttributeError, TypeError, SyntaxError, ValueError):
            return cls(_ANY)

    def text(self, value: object) -> str:
        """JSON text. Raises `PayloadError` for what cannot be stored without change, or is too large."""
        try:
            text = _dump(self._codec.encode(value, (None, "result", 0), _untried))
        except (RecursionError, _Untried):
            raise PayloadError("result: nested too deeply, or not JSON", path="result") from None
        size = len(text) if text.isascii() else len(text.encode())
        if size > LIMIT:
            raise PayloadError(f"result takes {size:,} bytes, the limit is {LIMIT:,}", path="result")
        return text
