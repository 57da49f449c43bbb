"""What a handler raised, as text that PostgreSQL can store: bounded, and never by trusting user code."""

import traceback
from contextlib import suppress
from typing import Any

__all__ = ["describe", "forget_frames", "storable"]

#: Bytes of last_error: class, head of the message, innermost frames.
LIMIT = 8_000
_MESSAGE = 2_000
_FRAMES = 20
_CHAIN = 50  # of causes: one may be its own
_SHOWN = 5  # leaves of a group, and causes
_LINE = 300


def describe(error: BaseException) -> str:
    """Class and message of `error`, its leaves if it is a group, its causes, then its innermost frames."""
    head = [_headline(error, _MESSAGE)]
    with suppress(BaseException):
        head += [f"  in it: {_headline(leaf, _LINE)}" for leaf in _leaves(error)]
        head += [f"  from: {line}" for line in _causes(error)]
    try:
        frames = traceback.extract_tb(_of(error, "__traceback__"))
        # the frames of the worker itself say nothing about the failure
        own = [frame for frame in frames if "/sqla_jobs/worker/" not in frame.filename.replace("\\", "/")]
        lines = traceback.format_list(own[-_FRAMES:])
    except BaseException:
        lines = []
    return storable("\n".join([*head, "", *lines]).rstrip() if lines else "\n".join(head))


def _headline(error: BaseException, limit: int) -> str:
    """Class and message, at most so many bytes of it."""
    name = type(error).__qualname__
    try:
        message = str(error)[:limit]
    except BaseException:  # a user's __str__ may raise anything
        message = "<its text cannot be made>"
    message = message.encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")
    return f"{name}: {message}" if message else name


def _leaves(error: BaseException) -> list[BaseException]:
    """The exceptions in a group that are no groups, as many as are shown."""
    found: list[BaseException] = []
    waiting = [error] if isinstance(error, BaseExceptionGroup) else []
    while waiting and len(found) < _SHOWN:
        for each in waiting.pop(0).exceptions:
            (waiting if isinstance(each, BaseExceptionGroup) else found).append(each)
    return found[:_SHOWN]


def _causes(error: BaseException) -> list[str]:
    """The nearest causes, and the one that it all began with."""
    chain: list[BaseException] = []
    seen = {id(error)}
    cause = _cause(error)
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        chain.append(cause)
        cause = _cause(cause)
    lines = [_headline(each, _LINE) for each in chain[:_SHOWN]]
    if len(chain) > _SHOWN:
        lines += [f"... {len(chain) - _SHOWN - 1} more ...", _headline(chain[-1], _LINE)]
    return lines


def _cause(error: BaseException) -> BaseException | None:
    cause: BaseException | None = _of(error, "__cause__")
    context: BaseException | None = _of(error, "__context__")
    return cause if cause is not None or _of(error, "__suppress_context__") else context


def _of(error: BaseException, name: str) -> Any:
    """An attribute as BaseException has it: a class of a user's may say anything, and its `bool` too."""
    found: Any = vars(BaseException)[name]
    return found.__get__(error)


def forget_frames(error: BaseException | None) -> None:
    """Let go of what the frames of a failure hold: locals of the handler, sockets of half-made connections.

    Exceptions and their frames hold each other, so that all of it would stay until the next full collection.
    """
    with suppress(BaseException):  # called where nothing may be raised
        for _ in range(_CHAIN):
            if error is None:
                return
            traceback.clear_frames(_of(error, "__traceback__"))
            # one that is raised again and again would add to it without end
            vars(BaseException)["__traceback__"].__set__(error, None)
            cause = _of(error, "__cause__")
            error = _of(error, "__context__") if cause is None else cause


def storable(text: str) -> str:
    """`text` without what PostgreSQL refuses (U+0000, lone surrogates), cut to LIMIT bytes."""
    encoded = text.replace("\0", "\ufffd").encode("utf-8", "replace")
    if len(encoded) > LIMIT:
        encoded = encoded[: LIMIT - 4] + b" ..."
    return encoded.decode("utf-8", "ignore")
