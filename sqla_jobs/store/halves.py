"""One statement for many rows, and what becomes of the others when the database refuses one of them.

A user's trigger or constraint may refuse any row: then its neighbours must not suffer, whatever the
statement. Does not know what is written; what fails for every row alike is passed on.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from sqla_jobs.store.door import brief, is_rows_fault

__all__ = ["by_halves"]

T = TypeVar("T")
R = TypeVar("R")


def by_halves(
    write: Callable[[Sequence[T]], R], items: Sequence[T]
) -> tuple[list[tuple[Sequence[T], R]], list[tuple[T, str]]]:
    """`write` all `items` at once, or by halves until what is refused is alone; for AUTOCOMMIT.

    Returns the parts with what `write` answered, in order, and each refused item with the reason.
    One refused item of n costs about 2 log2 n statements. Raises what is no single row's fault.
    """
    try:
        return [(items, write(items))], []
    except Exception as error:
        if not is_rows_fault(error):
            raise
        if len(items) == 1:
            return [], [(items[0], brief(error))]
    half = len(items) // 2
    written, refused = by_halves(write, items[:half])
    more_written, more_refused = by_halves(write, items[half:])
    return written + more_written, refused + more_refused
