"""What a statement that ends jobs says of them: which rows it wrote, and which it held and could not change.

A trigger that returns the wrong row, or a row security policy without a rule for this verb, makes PostgreSQL
leave a row as it is without an error. Counting what was locked would call that written.
"""

from typing import Any, NamedTuple

from sqlalchemy import BigInteger, case, func, null, select, type_coerce
from sqlalchemy.dialects.postgresql import ARRAY

__all__ = ["UNCHANGED", "Answer", "answer_of", "told"]

UNCHANGED = "the row did not change, and there was no error: a trigger or a row security policy keeps it"


class Answer(NamedTuple):
    """The ids of both."""

    ids: frozenset[int]
    unchanged: frozenset[int]


def told(held: Any, written: Any) -> list[Any]:
    """The first two columns of such a statement; the second is null but for rows that did not change."""
    rows = written.subquery("written")
    counts = [select(func.count()).select_from(each).scalar_subquery() for each in (held, rows)]
    ids = [func.array(select(each.c.id).scalar_subquery()) for each in (rows, held)]
    both = [type_coerce(each, ARRAY(BigInteger)) for each in ids]
    return [both[0], case((counts[0] != counts[1], both[1]), else_=null())]


def answer_of(result: Any) -> Answer:
    """Of its one row."""
    row = result.one()
    ids = frozenset(row[0])
    return Answer(ids, frozenset(row[1] or ()) - ids)
