"""One statement for many rows, and what becomes of the others when the database refuses one of them.

A user's trigger or constraint may refuse any row, with any code: then its neighbours must not suffer,
whatever the statement. Whose fault it is is found by experiment. Does not know what is written.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from sqla_jobs.store.door import brief, is_rows_fault, may_blame_a_row

__all__ = ["by_halves"]

T = TypeVar("T")
R = TypeVar("R")

#: So many rows in a row that fail alone, and none that does not: then it is none of them.
_ENOUGH = 16


def by_halves(
    write: Callable[[Sequence[T]], R], items: Sequence[T]
) -> tuple[list[tuple[Sequence[T], R]], list[tuple[T, str]]]:
    """`write` all `items` at once, or by halves until what is refused is alone; for AUTOCOMMIT.

    Returns the parts with what `write` answered, in order, and each refused item with the reason.
    One refused item of n costs about 2 log2 n statements. Raises what is no single row's fault: an error
    that may be about anything counts as a row's only when another row could be written.
    """
    search = _Search(write)
    search.on(items)
    if search.doubtful is not None and not search.written:
        raise search.doubtful
    return search.written, [(item, brief(error)) for item, error in search.refused]


class _Search(Generic[T, R]):
    def __init__(self, write: Callable[[Sequence[T]], R]) -> None:
        self.write = write
        self.written: list[tuple[Sequence[T], R]] = []
        self.refused: list[tuple[T, Exception]] = []
        self.doubtful: Exception | None = None  # the first that may be about more than its row

    def on(self, items: Sequence[T]) -> None:
        try:
            self.written.append((items, self.write(items)))
        except Exception as error:
            if not may_blame_a_row(error):
                raise
            if len(items) > 1:
                half = len(items) // 2
                self.on(items[:half])
                self.on(items[half:])
                return
            self.refused.append((items[0], error))
            if not is_rows_fault(error):
                self.doubtful = self.doubtful or error
                if not self.written and len(self.refused) >= _ENOUGH:
                    raise
