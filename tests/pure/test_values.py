"""Arguments by their own types are what the handler's decoder reads."""

import uuid
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Any

import pytest

from sqla_jobs.core.payload import Parameters
from sqla_jobs.core.values import encode_values
from sqla_jobs.errors import PayloadError


class Level(StrEnum):
    LOW = "low"


class Size(IntEnum):
    BIG = 3


class Colour(Enum):
    RED = (1, 2)


@dataclass
class Line:
    item: str
    price: Decimal


VALUES: list[tuple[Any, Any]] = [
    (None, None),
    (True, bool),
    (2**70, int),
    (0.1, float),
    ("é\u2028", str),
    (Level.LOW, Level),
    (Size.BIG, Size),
    (Colour.RED, Colour),
    (date(2026, 3, 1), date),
    (time(1, 2, 3, 4), time),
    (datetime(2026, 10, 25, 2, 30, tzinfo=UTC), datetime),
    (timedelta(days=-1, microseconds=1), timedelta),
    (Decimal("1.10"), Decimal),
    (uuid.UUID(int=5), uuid.UUID),
    (b"\x00\xff", bytes),
    (Line("a", Decimal("0.10")), Line),
    ([Line("a", Decimal(1)), Line("b", Decimal(2))], list[Line]),
    ((1, date(2026, 1, 1)), tuple[int, date]),
    ({3, 1, 2}, set[int]),
    (frozenset({Level.LOW}), frozenset[Level]),
    ({"a": [Decimal("1.0")]}, dict[str, list[Decimal]]),
    ({1: "a", 2: "b"}, dict[int, str]),
    ({Size.BIG: 1}, dict[Size, int]),
    ({uuid.UUID(int=5): 1}, dict[uuid.UUID, int]),
]


@pytest.mark.parametrize(("value", "annotation"), VALUES, ids=[repr(value)[:40] for value, _ in VALUES])
def test_what_is_encoded_by_value_is_decoded_by_annotation(value: Any, annotation: Any) -> None:
    def handler(value: Any) -> None: ...

    handler.__annotations__["value"] = annotation
    parameters = Parameters.of(handler, skip_first=False)

    text = encode_values({"value": value}).text()

    assert parameters.decode(text, lambda *_: pytest.fail("no entity here")) == {"value": value}


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (float("nan"), "value"),
        ({"a": [1, {"b": float("inf")}]}, r"value\.a\[1\]\.b"),
        ("a\0b", "value"),
        ({"a\0": 1}, "value"),
        ("\ud800", "value"),
        (datetime(2026, 1, 1), "value"),
        (object(), "value"),
        ([1, object()], r"value\[1\]"),
        ({1: "a", "1": "b"}, "value"),
        ({(1, 2): 3}, "value"),
        ({None: 3}, "value"),
        ("x" * 300_000, "value"),
        (Decimal("NaN"), "value"),
        (lambda: None, "value"),
    ],
)
def test_what_cannot_travel_is_refused_with_its_path(value: Any, path: str) -> None:
    with pytest.raises(PayloadError, match=path):
        encode_values({"value": value})


def test_what_contains_itself_is_refused() -> None:
    knot: list[Any] = []
    knot.append(knot)

    with pytest.raises(PayloadError, match="nested deeper than 200 levels"):
        encode_values({"value": knot})
