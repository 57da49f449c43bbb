"""What a handler raised, as text that PostgreSQL can store: bounded, and never by trusting user code."""

import traceback
from contextlib import suppress

__all__ = ["describe", "forget_frames", "storable"]

#: Bytes of last_error: class, head of the message, innermost frames.
LIMIT = 8_000
_MESSAGE = 2_000
_FRAMES = 20
_CHAIN = 50  # of causes: one may be its own


def describe(error: BaseException) -> str:
    """The class and message of `error`, then its innermost frames."""
    name = type(error).__qualname__
    try:
        message = str(error)
    except BaseException:  # a user's __str__ may raise anything
        message = "<its text cannot be made>"
    head = f"{name}: {message[:_MESSAGE]}" if message else name
    try:
        frames = traceback.extract_tb(error.__traceback__)
        # the frames of the worker itself say nothing about the failure
        own = [frame for frame in frames if "/sqla_jobs/worker/" not in frame.filename.replace("\\", "/")]
        lines = traceback.format_list(own[-_FRAMES:])
    except BaseException:
        lines = []
    return storable("\n".join([head, "", *lines]).rstrip() if lines else head)


def forget_frames(error: BaseException | None) -> None:
    """Let go of what the frames of a failure hold: locals of the handler, sockets of half-made connections.

    Exceptions and their frames hold each other, so that all of it would stay until the next full collection.
    """
    for _ in range(_CHAIN):
        if error is None:
            return
        with suppress(Exception):
            traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def storable(text: str) -> str:
    """`text` without what PostgreSQL refuses (U+0000, lone surrogates), cut to LIMIT bytes."""
    encoded = text.replace("\0", "\ufffd").encode("utf-8", "replace")
    if len(encoded) > LIMIT:
        encoded = encoded[: LIMIT - 4] + b" ..."
    return encoded.decode("utf-8", "ignore")
