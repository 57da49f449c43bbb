"""Arguments out of a select: its columns as the JSON that the handler's decoders read.

Which rendering of a column fits a parameter is tried with the real decoder on a sample, at the call; what
fits no way is refused there, by name. Values themselves are not looked at before the job runs.
"""

from collections.abc import Callable
from datetime import date
from typing import Any

from sqlalchemy import (
    ARRAY,
    JSON,
    Boolean,
    ColumnElement,
    Date,
    DateTime,
    Enum,
    Float,
    Integer,
    Interval,
    LargeBinary,
    Numeric,
    String,
    Text,
    Time,
    Uuid,
    case,
    cast,
    extract,
    func,
    literal,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.sql.expression import SelectBase, Subquery
from sqlalchemy.types import TypeEngine

from sqla_jobs.core.payload import Json, Parameters
from sqla_jobs.errors import ArgumentError

__all__ = ["arguments_of"]

Rendering = Callable[[Any], ColumnElement[Any]]
_ANYTHING = object()  # no sample: what the column holds decides
_DAY = date(2026, 3, 1).isoformat()


def arguments_of(
    task: str, statement: SelectBase, parameters: Parameters | None
) -> tuple[Subquery, ColumnElement[Any]]:
    """The select as a source of rows, and the payload of one row as an expression over it.

    Raises `ArgumentError` when a column has no parameter, a parameter no column, or the types do not fit.
    """
    names = list(statement.selected_columns.keys())
    if parameters is not None:
        parameters.check_names(names)
    source = statement.subquery("given")
    parts: list[Any] = []
    for name in names:
        column = source.c[name]
        parts += [cast(literal(name, Text), Text), _rendered(task, name, column, parameters)]
    return source, func.jsonb_build_object(*parts, type_=JSONB)


def _rendered(task: str, name: str, column: Any, parameters: Parameters | None) -> ColumnElement[Any]:
    for sample, rendering in _renderings(column.type):
        if parameters is None or _fits(parameters, name, sample):
            return rendering(column)
    raise ArgumentError(
        f"task {task}: column {name!r} of the select is {column.type!r}, which the handler's parameter "
        "cannot be made of: cast it, or select what identifies the value"
    )


def _fits(parameters: Parameters, name: str, sample: Any) -> bool:
    if sample is _ANYTHING:
        return True
    if sample == "":  # any text: an enum or a literal would refuse every sample but its own
        return parameters.stores_text(name)
    return parameters.reads(name, sample)


def _renderings(type_: TypeEngine[Any]) -> list[tuple[Any, Rendering]]:
    """Ways to write a column as JSON, with a sample of each; the exact one first."""
    as_it_is: Rendering = lambda column: func.to_jsonb(column)  # noqa: E731
    samples: dict[type[TypeEngine[Any]], list[tuple[Json, Rendering]]] = {
        Boolean: [(True, as_it_is)],
        Integer: [(1, as_it_is)],
        Float: [(1.5, as_it_is)],
        Numeric: [("1.5", lambda column: func.to_jsonb(cast(column, Text))), (1.5, as_it_is)],
        Date: [(_DAY, as_it_is)],
        Time: [("12:30:00", as_it_is)],
        Interval: [("PT90.000000S", _interval)],
        Uuid: [("5a5a5a5a-5a5a-4a5a-8a5a-5a5a5a5a5a5a", as_it_is)],
        LargeBinary: [("AAAA", _base64)],
    }
    if isinstance(type_, DateTime):
        return [(f"{_DAY}T12:30:00{'+00:00' if type_.timezone else ''}", as_it_is)]
    if isinstance(type_, JSON):
        return [(_ANYTHING, lambda column: cast(column, JSONB))]
    if isinstance(type_, Enum):
        return _of_enum(type_)
    if isinstance(type_, String):
        return [("", as_it_is)]
    if isinstance(type_, ARRAY):
        inner = _renderings(type_.item_type)
        simple = [sample for sample, rendering in inner if rendering.__name__ == as_it_is.__name__]
        return [([sample] if sample != "" else [], as_it_is) for sample in simple[:1]]
    for cls, found in samples.items():
        if isinstance(type_, cls):
            return list(found)
    return []


def _of_enum(type_: Enum) -> list[tuple[Any, Rendering]]:
    """The database has labels, by default the names of the members; a handler reads their values."""
    if not type_.enums:
        return []
    as_text: Rendering = lambda column: func.to_jsonb(cast(column, Text))  # noqa: E731
    members = getattr(type_.enum_class, "__members__", {}).values()
    label_of: Any = type_._db_value_for_elem
    labels = {label_of(member): member.value for member in members}
    if all(label == value for label, value in labels.items()):
        return [(str(type_.enums[0]), as_text)]
    # by value, whatever the labels; a label may be the value of another member
    whens = [(cast(literal(label, Text), Text), literal(value, JSONB)) for label, value in labels.items()]

    def by_value(column: Any) -> ColumnElement[Any]:
        return case(*[(cast(column, Text) == label, value) for label, value in whens])

    return [(next(iter(labels.values())), by_value)]


def _interval(column: Any) -> ColumnElement[Any]:
    seconds = extract("epoch", column)
    sign = case((seconds < 0, literal("-PT", Text)), else_=literal("PT", Text))
    return func.to_jsonb(sign + cast(func.round(func.abs(seconds), 6), Text) + literal("S", Text))


def _base64(column: Any) -> ColumnElement[Any]:
    # PostgreSQL breaks its base64 into lines
    return func.to_jsonb(
        func.replace(func.encode(column, literal("base64", Text)), literal("\n", Text), literal("", Text))
    )
