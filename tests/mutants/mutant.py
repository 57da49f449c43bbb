"""What a mutant is: one line of the code, broken, and who must notice."""

from typing import NamedTuple

__all__ = ["Mutant"]


class Mutant(NamedTuple):
    """One broken line: which guarantee it keeps, and the tests of which one must go red.

    `old` occurs exactly once in `file`. `tests` are files, or `file::test`.
    """

    name: str
    guarantee: int
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
