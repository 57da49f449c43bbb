"""Arguments come back as they went in, or are refused at the call: where, and with a way out.

What PostgreSQL's jsonb does to a text is modelled by `jsonb` below, which was compared with a server (15).
"""

import enum
import functools
import inspect
import json
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    TypedDict,
    TypeVar,
)
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import TypeAliasType

from sqla_jobs.core.payload import DEPTH, LIMIT, Json, Parameters, Reference, check_signature, converter
from sqla_jobs.errors import ArgumentError, PayloadError, TaskDefinitionError

# -- helpers


def jsonb(text: str) -> str:
    """What jsonb gives back: numbers in full digits, no negative zero, keys by length, then bytes."""

    def shown(value: Any) -> str:
        if isinstance(value, Decimal):
            return f"{abs(value) if value == 0 else value:f}"
        if isinstance(value, list):
            return f"[{', '.join(map(shown, value))}]"
        if isinstance(value, dict):
            keys = sorted(value, key=lambda key: (len(key.encode()), key.encode()))
            return f"{{{', '.join(f'{json.dumps(key)}: {shown(value[key])}' for key in keys)}}}"
        return json.dumps(value)

    return shown(json.loads(text, parse_float=Decimal, parse_int=Decimal))


def plan(annotation: object, hooks: Sequence[Any] = ()) -> Parameters:
    def handler(x: Any) -> None: ...

    handler.__annotations__ = {"x": annotation}
    return Parameters.of(handler, skip_first=False, hooks=hooks)


def no_load(cls: type, identity: object) -> object:
    raise AssertionError("nothing to load here")


def stored(annotation: object, value: object) -> Any:
    return json.loads(plan(annotation).encode((value,), {}).text())["x"]


def travel(annotation: object, value: object) -> Any:
    parameters = plan(annotation)
    return parameters.decode(jsonb(parameters.encode((value,), {}).text()), no_load)["x"]


def arrive(annotation: object, value: object) -> Any:
    return plan(annotation).decode(json.dumps({"x": value}), no_load)["x"]


def identical(one: Any, other: Any) -> bool:
    """Equal and of the same type, all the way down: 1 == 1.0 == True is not enough."""
    if type(one) is not type(other) or one != other:
        return False
    if isinstance(one, list | tuple):
        return all(map(identical, one, other))
    if isinstance(one, dict):
        return all(
            any(identical(key, k) and identical(value, other[k]) for k in other) for key, value in one.items()
        )
    if isinstance(one, set | frozenset):
        return all(any(identical(item, each) for each in other) for item in one)
    return True


class Color(enum.Enum):
    RED = "r"
    BLUE = "b"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Word(enum.StrEnum):
    A = "a"


class Shape(enum.Enum):
    ROUND = (1, 2)
    FLAT = 2.5


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


@dataclass
class Line:
    price: float
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Order:
    lines: list[Line]
    when: datetime
    tags: frozenset[str] = frozenset()


class Point(NamedTuple):
    x: int
    y: int = 0


class Settings(TypedDict):
    name: str
    since: NotRequired[date]


@dataclass
class Node:
    name: str
    children: "list[Node]" = field(default_factory=list)


T = TypeVar("T")


@dataclass
class Box(Generic[T]):
    content: T
    more: list[T] = field(default_factory=list)


Amount = NewType("Amount", int)
Tree = TypeAliasType("Tree", "list[Tree] | int")  # from 3.12 on: type Tree = list[Tree] | int

# -- table V1 of the field reports


V1_EQUAL = {
    "3": ({"a": r"x\u0000y"}, Any),
    "15": ({"t": datetime(2026, 1, 1, tzinfo=UTC)}, dict[str, datetime]),
    "16": ({"u": UUID(int=1)}, dict[str, UUID]),
    "17": ({"d": Decimal("1.10")}, dict[str, Decimal]),
    "18": (Word.A, Word),
    "19": (Level.LOW, Level),
    "20": (Color.RED, Color),
    "21 set": ({"s": {1, 2}}, dict[str, set[int]]),
    "21 bytes": ({"b": b"x"}, dict[str, bytes]),
    "22": ({"t": (1, 2)}, dict[str, tuple[int, int]]),
    "29": ({"bb": 1, "a": 2, "ccc": 3}, dict[str, int]),
    "30 accents": ("é" * 3000, str),
    "30 emoji": ("😀" * 2000, str),
    "30 controls": (["\u2028", "\ufeff", "\x01", "\x7f"], Any),
    "31": ([2**53 + 1, 2**63, 2**64, -(2**63) - 1], Any),
}


@pytest.mark.parametrize(("value", "annotation"), V1_EQUAL.values(), ids=V1_EQUAL)
def test_v1_comes_back_equal_and_of_the_same_type(value: object, annotation: object) -> None:
    assert identical(travel(annotation, value), value)


deep: list[Any] = []
for _ in range(5_000):
    deep = [deep]

V1_REFUSED = {
    "1": ({"a": "x\x00y"}, "x.a", "U+0000"),
    "2": ({"a\x00": 1}, r"x['a\x00']", "U+0000"),
    "4": ({"a": ["ok", {"b": "\x00"}]}, "x.a[1].b", "U+0000"),
    "15": ({"t": datetime(2026, 1, 1, tzinfo=UTC)}, "x.t", "datetime.datetime would not come back the same"),
    "16": ({"u": UUID(int=1)}, "x.u", "annotate the parameter"),
    "17": ({"d": Decimal("1.10")}, "x.d", "annotate the parameter"),
    "18": ({"e": Word.A}, "x.e", "annotate the parameter"),
    "19": ({"e": Level.LOW}, "x.e", "annotate the parameter"),
    "20": ({"e": Color.RED}, "x.e", "annotate the parameter"),
    "21 set": ({"s": {1, 2}}, "x.s", "set would not come back the same"),
    "21 bytes": ({"b": b"x"}, "x.b", "bytes would not come back the same"),
    "22": ({"t": (1, 2)}, "x.t", "tuple would not come back the same"),
    "23": ({1: "a", "1": "b"}, "x", "a key is int 1, JSON keys are text; annotate the keys"),
    "24": ({True: 1, None: 2, 1.5: 3}, "x", "a key is True"),
    "25": ({(1, 2): 1}, "x", "a key is tuple"),
    "28": ("x" * 268_435_456, "x", "268,435,456 bytes, the limit is 262,144"),
}


@pytest.mark.parametrize(("value", "path", "words"), V1_REFUSED.values(), ids=V1_REFUSED)
def test_v1_is_refused_at_the_call_where_no_annotation_says_how(value: object, path: str, words: str) -> None:
    with pytest.raises(PayloadError) as refused:
        plan(Any).encode((value,), {})

    assert refused.value.path == path
    assert str(refused.value).startswith(f"{path}: ")
    assert words in str(refused.value)


def test_v1_26_null_as_the_whole_payload_is_refused_with_what_to_write_instead() -> None:
    with pytest.raises(PayloadError, match=r"is None, not an object; write at least \{\}"):
        plan(Any).decode("null", no_load)


@pytest.mark.parametrize("annotation", [Any, list[Any], Tree])
def test_v1_27_deep_nesting_is_a_payload_error_that_says_so(annotation: object) -> None:
    with pytest.raises(PayloadError, match="contains itself; flatten it") as refused:
        plan(annotation).encode((deep,), {})

    assert refused.value.path.startswith("x")
    assert len(refused.value.path) <= 200


# -- what travels, and as which JSON

AS_JSON = [
    (datetime, datetime(2026, 3, 29, 2, 30, 0, 5, tzinfo=UTC), "2026-03-29T02:30:00.000005+00:00"),
    (date, date(2026, 2, 28), "2026-02-28"),
    (time, time(23, 59, 59, 1), "23:59:59.000001"),
    (timedelta, timedelta(days=1, seconds=30), "PT86430.000000S"),
    (timedelta, timedelta(microseconds=-1), "-PT0.000001S"),
    (timedelta, timedelta.max, "PT86399999999999.999999S"),
    (timedelta, timedelta.min, "-PT86399999913600.000000S"),
    (UUID, UUID("12345678-1234-5678-1234-567812345678"), "12345678-1234-5678-1234-567812345678"),
    (Decimal, Decimal("1.10"), "1.10"),
    (Decimal, Decimal("-0E+3"), "-0E+3"),
    (bytes, b"\x00\xff", "AP8="),
    (Color, Color.BLUE, "b"),
    (Shape, Shape.ROUND, "ROUND"),
    (Rights, Rights.READ | Rights.WRITE, 3),
    (Level, Level.HIGH, 2),
    (tuple[int, str], (1, "a"), [1, "a"]),
    (tuple[int, ...], (1, 2, 3), [1, 2, 3]),
    (tuple[()], (), []),
    (tuple, (1, "a"), [1, "a"]),
    (set[int], {8, 1}, [1, 8]),
    (frozenset[str], frozenset({"b", "a"}), ["a", "b"]),
    (AbstractSet[int], {1}, [1]),
    (Sequence[int], [1], [1]),
    (Mapping[str, int], {"a": 1}, {"a": 1}),
    (dict, {"a": [None]}, {"a": [None]}),
    (dict[int, str], {-1: "a", 2**70: "b"}, {"-1": "a", "1180591620717411303424": "b"}),
    (dict[UUID, int], {UUID(int=1): 1}, {"00000000-0000-0000-0000-000000000001": 1}),
    (dict[date, int], {date(2026, 1, 1): 1}, {"2026-01-01": 1}),
    (dict[Color, int], {Color.RED: 1}, {"r": 1}),
    (dict[Level, int], {Level.LOW: 1}, {"1": 1}),
    (dict[Literal["a", "b"], int], {"a": 1}, {"a": 1}),
    (Literal["a", 1, True, Color.RED], Color.RED, "r"),
    (Literal["a", 1, True], True, True),
    (float | None, 3.5, 3.5),
    (int, True, True),
    (Amount, 5, 5),
    (Annotated[date, []], date(2026, 1, 1), "2026-01-01"),
    (list[Annotated[int, []]], [1], [1]),
    (Line, Line(1.5), {"price": 1.5, "note": None}),
    (Point, Point(1), {"x": 1, "y": 0}),
    (Settings, {"name": "a"}, {"name": "a"}),
    (Settings, {"name": "a", "since": date(2026, 1, 1)}, {"name": "a", "since": "2026-01-01"}),
    (Node, Node("a", [Node("b")]), {"name": "a", "children": [{"name": "b", "children": []}]}),
    (Box[date], Box(date(2026, 1, 1), [date.min]), {"content": "2026-01-01", "more": ["0001-01-01"]}),
    (Tree, [[1], 2], [[1], 2]),
    (int | str, "1", "1"),
    (float | int, 5, 5),
    (int | float, 5.0, 5.0),
    (bool | int, 1, 1),
    (Decimal | int, 5, 5),
    (UUID | str, "no identity", "no identity"),
    (list[int] | list[str], ["1"], ["1"]),
    (Line | Point, Point(1, 2), {"x": 1, "y": 2}),
    (date | datetime, datetime(2026, 1, 1, tzinfo=UTC), "2026-01-01T00:00:00+00:00"),
]


def _in_order(value: object) -> str:
    """The same in every process, whatever the seed of its hashes."""
    return str(sorted(value) if isinstance(value, frozenset) else value)[:40]


@pytest.mark.parametrize(("annotation", "value", "as_json"), AS_JSON, ids=_in_order)
def test_a_value_has_its_documented_json_and_comes_back(
    annotation: object, value: object, as_json: object
) -> None:
    assert identical(stored(annotation, value), as_json)
    assert identical(travel(annotation, value), value)


def test_a_dataclass_of_dataclasses_comes_back() -> None:
    order = Order([Line(1.5, "é"), Line(2.0)], datetime(2026, 1, 1, tzinfo=UTC), frozenset({"a"}))

    assert travel(Order, order) == order


def test_fields_that_the_constructor_does_not_take_are_kept() -> None:
    @dataclass(frozen=True)
    class Ticket:
        name: str
        number: int = field(init=False, default=0)

    ticket = Ticket("a")
    object.__setattr__(ticket, "number", 7)

    assert travel(Ticket, ticket).number == 7
    assert arrive(Ticket, {"name": "a"}).number == 0


def test_an_int_under_float_arrives_as_a_float() -> None:
    assert identical(travel(float, 3), 3.0)
    assert identical(travel(dict[str, float | None], {"a": 3, "b": None}), {"a": 3.0, "b": None})


@pytest.mark.parametrize("value", [1e16, 1e22, 1e23, 1.7976931348623157e308, -1e300, 5e-324, 1e-7, 0.1])
def test_a_float_stays_a_float_although_jsonb_writes_large_ones_as_integers(value: float) -> None:
    assert identical(travel(float, value), value)


def test_negative_zero_arrives_as_zero_because_jsonb_has_no_sign_for_it() -> None:
    assert str(travel(float, -0.0)) == "0.0"


@pytest.mark.parametrize(("fold", "instant"), [(0, "2026-10-25T00:30"), (1, "2026-10-25T01:30")])
def test_an_ambiguous_hour_keeps_its_instant(fold: int, instant: str) -> None:
    berlin = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=fold)

    arrived = travel(datetime, berlin)

    assert arrived.astimezone(UTC).isoformat() == f"{instant}:00+00:00"
    assert arrived.replace(tzinfo=None) == datetime(2026, 10, 25, 2, 30)


def test_subclasses_of_uuid_and_datetime_arrive_as_the_plain_class() -> None:
    class DriverUUID(UUID): ...

    class FakeDatetime(datetime): ...

    assert identical(travel(UUID, DriverUUID(int=1)), UUID(int=1))
    assert identical(
        travel(datetime | None, FakeDatetime(2026, 1, 1, tzinfo=UTC)), datetime(2026, 1, 1, tzinfo=UTC)
    )


def test_a_subclass_that_knows_more_than_a_datetime_is_refused() -> None:
    class Stamp(datetime):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stamp)

        __hash__ = datetime.__hash__

    with pytest.raises(PayloadError, match="would not come back equal"):
        plan(datetime).encode((Stamp(2026, 1, 1, tzinfo=UTC),), {})


# -- refusals


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("never called")

    __str__ = __repr__


class PlainSubclass(str):
    __slots__ = ()


@dataclass
class Doubles:
    total: int

    def __post_init__(self) -> None:
        self.total *= 2


@dataclass
class Picky:
    total: int

    def __post_init__(self) -> None:
        if self.total < 0:
            raise ValueError("a text that may be secret")


@dataclass(eq=False)
class Stable:
    name: str

    def __post_init__(self) -> None:
        self.name = self.name.lower()


loop: list[Any] = []
loop.append({"again": loop})

NAN, INF = float("nan"), float("inf")
BERLIN = timezone(timedelta(hours=1))

REFUSED = [
    (Any, {"m": NAN}, "x.m", "float nan is no finite float and JSON has no other; pass None"),
    (Any, {"m": [1, -INF]}, "x.m[1]", "float -inf"),
    (float, INF, "x", "float inf"),
    (Any, [1e16], "x[0]", "float 1e+16 would come back from jsonb as an int; annotate the parameter `float`"),
    (Any, -1e22, "x", "annotate the parameter `float`"),
    (Any, [Broken()], "x[0]", "Broken would not come back the same"),
    (Any, OrderedDict(a=1), "x", "collections.OrderedDict"),
    (Any, PlainSubclass("a"), "x", "PlainSubclass would not come back the same"),
    (Any, 10**5000, "x", "an int of more than 3,900 digits"),
    (Any, "\ud83d", "x", "a lone surrogate"),
    (Any, {"\ud83d": 1}, r"x['\ud83d']", "a lone surrogate"),
    (str, "a\ud800b", "x", "a lone surrogate"),
    (str, "a\x00", "x", "U+0000"),
    (str, b"a", "x", "expected str, got bytes"),
    (str, Word.A, "x", "pass a plain str, or annotate the parameter with Word"),
    (str, None, "x", "expected str, got None"),
    (int, 1.0, "x", "expected int, got float 1.0"),
    (int, Level.LOW, "x", "annotate the parameter with Level"),
    (float, True, "x", "expected float, got True"),
    (float, 2**53 + 1, "x", "int 9007199254740993 is not exact as a float; annotate the parameter `int`"),
    (float, 10**400, "x", "no finite float"),
    (bool, 1, "x", "expected bool, got int 1"),
    (None, 0, "x", "expected None, got int 0"),
    (datetime, datetime(2026, 1, 1), "x", "a naive datetime names no instant; pass datetime.now(UTC)"),
    (list[datetime], [datetime(2026, 1, 1)], "x[0]", "naive"),
    (
        datetime,
        datetime(2026, 1, 1, tzinfo=timezone(timedelta(microseconds=1))),
        "x",
        "a fraction of a second",
    ),
    (datetime, date(2026, 1, 1), "x", "expected datetime, got datetime.date"),
    (date, datetime(2026, 1, 1), "x", "expected date, got datetime.datetime"),
    (time, time(1, tzinfo=BERLIN), "x", "a time with a zone"),
    (Decimal, Decimal("NaN"), "x", "a Decimal that is not finite"),
    (Decimal, Decimal("-Infinity"), "x", "a Decimal that is not finite"),
    (Decimal, 1, "x", "expected Decimal, got int 1"),
    (UUID, "12345678-1234-5678-1234-567812345678", "x", "expected UUID, got str"),
    (bytes, bytearray(b"a"), "x", "expected bytes, got bytearray"),
    (bytes, b"a" * LIMIT, "x", "bytes, the limit is 262,144"),
    (Color, "r", "x", "expected Color, got str"),
    (Literal["a", 1], True, "x", "expected one of the literals, got True"),
    (Literal["a", 1], [], "x", "expected one of the literals, got list"),
    (list[int], (1, 2), "x", "expected list, got tuple"),
    (Sequence[str], "abc", "x", "expected list, got str"),
    (tuple[int, int], (1,), "x", "expected 2 items, got list"),
    (tuple[int, ...], [1], "x", "expected tuple, got list"),
    (tuple[int, ...], Point(1), "x", "expected tuple, got"),
    (set[str], {"a\x00"}, "x[0]", "U+0000"),
    (dict[str, int], {1: 1}, "x[1]", "expected str, got int 1"),
    (dict[int, int], {True: 1}, "x[True]", "expected int, got True"),
    (dict[int, int], {1: 1.5}, "x[1]", "expected int, got float 1.5"),
    (
        dict[str, str],
        OrderedDict(a="b"),
        "x",
        "expected dict, got collections.OrderedDict; pass a plain dict",
    ),
    (Line, Line("1"), "x.price", "expected float, got str"),  # type: ignore[arg-type]
    (Order, Order([Line(1), Line(NAN)], datetime.now(UTC)), "x.lines[1].price", "float nan"),
    (Order, {"lines": []}, "x", "expected Order, got dict"),
    (Settings, {"since": date(2026, 1, 1)}, "x", "Settings lacks name"),
    (Settings, {"name": "a", "nmae": "b"}, "x.nmae", "Settings has no such field"),
    (Settings, {"name": "a", 1: "b"}, "x[1]", "Settings has no such field"),
    (Doubles, Doubles(1), "x", "Doubles would not come back equal"),
    (int | str, 1.5, "x", "expected int | str, got float 1.5"),
    (int | list[str], ["a", 1], "x[1]", "expected str, got int 1"),
    (date | str, "2026-01-01", "x", "as JSON this str is taken for another of"),
    (int | float, 1e16, "x", "as JSON this float 1e+16 is taken for another of int | float"),
    (list[int] | list[float], [1e22], "x", "as JSON this list is taken for another of"),
    (list[Any], loop, "x[0].again[0].again[0].again", "contains itself"),
    (Any, {"a" * 60: {"b c": NAN}}, f"x['{'a' * 40}']['b c']", "float nan"),
    (dict[date, int], {date(2026, 1, 1): "a"}, "x[datetime.date]", "expected int, got str"),
]


@pytest.mark.parametrize(
    ("annotation", "value", "path", "words"), REFUSED, ids=[str(i) for i in range(len(REFUSED))]
)
def test_what_would_change_is_refused_at_the_call_with_its_path(
    annotation: object, value: object, path: str, words: str
) -> None:
    with pytest.raises(PayloadError) as refused:
        plan(annotation).encode((value,), {})

    assert refused.value.path.startswith(path)
    assert len(refused.value.path) <= 200
    assert str(refused.value).startswith(f"{refused.value.path}: ")
    assert words in str(refused.value)
    assert "\x00" not in str(refused.value)
    str(refused.value).encode()


@pytest.mark.parametrize("levels", [DEPTH, DEPTH + 1])
def test_the_depth_limit_is_exact(levels: int) -> None:
    nested: list[Any] = []
    for _ in range(levels - 1):
        nested = [nested]

    if levels <= DEPTH:
        assert travel(Any, nested) == nested
    else:
        with pytest.raises(PayloadError, match="nested deeper than 200 levels"):
            plan(Any).encode((nested,), {})


def test_a_caller_deep_in_its_own_stack_gets_a_payload_error_too() -> None:
    parameters, nested = plan(Tree), json.loads("[" * 50 + "]" * 50)

    def down(frames: int) -> None:
        if frames:
            down(frames - 1)
        else:
            parameters.encode((nested,), {})

    with pytest.raises(PayloadError, match="x: nested too deeply"):
        down(sys.getrecursionlimit() - len(inspect.stack(0)) - 60)


SECRET = "correct horse"


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (int, SECRET),
        (Any, [SECRET + "\x00"]),
        (str, SECRET + "\ud800"),
        (UUID, SECRET),
        (Literal["a"], SECRET),
    ],
)
def test_no_message_shows_a_text_that_was_given(annotation: object, value: object) -> None:
    with pytest.raises(PayloadError) as refused:
        plan(annotation).encode((value,), {})

    assert SECRET not in str(refused.value)
    assert refused.value.__suppress_context__


@pytest.mark.parametrize(
    "annotation", [datetime, UUID, Decimal, timedelta, bytes, Color, int, Line, date | UUID]
)
def test_no_message_shows_a_text_that_was_stored(annotation: object) -> None:
    with pytest.raises(PayloadError) as refused:
        arrive(annotation, SECRET)

    assert refused.value.path == "x"
    assert SECRET not in str(refused.value)
    assert refused.value.__suppress_context__


def test_a_constructor_that_changes_nothing_more_is_no_reason_to_refuse() -> None:
    assert travel(Stable, Stable("ABC")).name == "abc"
    assert identical(travel(Picky, Picky(1)), Picky(1))


# -- sizes

OVERHEAD = len('{"x":""}')


@pytest.mark.parametrize(("character", "size"), [("a", 1), ("é", 2), ("€", 3), ("😀", 4)])
def test_the_size_limit_counts_bytes_of_utf8(character: str, size: int) -> None:
    room = LIMIT - OVERHEAD
    fits = character * (room // size) + "a" * (room % size)

    assert len(plan(str).encode((fits,), {}).text().encode()) == LIMIT
    with pytest.raises(
        PayloadError, match=r"^x: the payload takes 262,145 bytes, the limit is 262,144; store"
    ):
        plan(str).encode((fits + "a",), {})


def test_the_size_limit_names_the_largest_argument() -> None:
    def handler(small: str, large: list[int], other: str) -> None: ...

    with pytest.raises(PayloadError) as refused:
        Parameters.of(handler, skip_first=False).encode(("a" * 100_000, [10**9] * 20_000, "b"), {})

    assert refused.value.path == "large"


# -- calls


def send(ctx: object, order: int, copy_to: str | None = None, *, urgent: bool = False) -> None: ...


SEND = Parameters.of(send, skip_first=True)


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((1,), {}, '{"order":1}'),
        ((1, None), {}, '{"order":1,"copy_to":null}'),
        ((), {"order": 1, "urgent": True}, '{"order":1,"urgent":true}'),
        ((1, "é"), {}, '{"order":1,"copy_to":"é"}'),
    ],
)
def test_a_call_is_stored_by_name_without_the_defaults_it_did_not_give(
    args: tuple[object, ...], kwargs: dict[str, object], text: str
) -> None:
    assert SEND.encode(args, kwargs).text() == text


@pytest.mark.parametrize(
    ("args", "kwargs", "problem"),
    [
        ((), {}, "misses order"),
        ((1, "a", True), {}, "takes 2 positional arguments, got 3"),
        ((1,), {"order": 2}, "got 'order' twice"),
        ((1,), {"copyto": "a"}, "has no parameter 'copyto'"),
        ((1,), {"ctx": 1}, "has no parameter 'ctx'"),
    ],
)
def test_a_call_that_does_not_fit_says_how_to_call(
    args: tuple[object, ...], kwargs: dict[str, object], problem: str
) -> None:
    with pytest.raises(ArgumentError) as refused:
        SEND.encode(args, kwargs)

    signature = "send(order: int, copy_to: str | None = ..., *, urgent: bool = ...)"
    assert str(refused.value) == f"task {__name__}.send {problem}; call it as {signature}"


def test_a_broken_repr_of_a_default_does_not_break_the_message() -> None:
    def handler(x: Any = Broken()) -> None: ...  # noqa: B008

    with pytest.raises(ArgumentError, match=r"handler\(x: Any = \.\.\.\)"):
        Parameters.of(handler, skip_first=False).encode((1, 2), {})


def var_positional(ctx: object, *items: int) -> None: ...
def var_keyword(ctx: object, **items: int) -> None: ...
def positional_only(ctx: object, item: int, /) -> None: ...
def context_by_name(*, ctx: object) -> None: ...
def no_context() -> None: ...


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (var_positional, "'items' is variadic positional, but arguments are stored by name; spell out"),
        (var_keyword, "'items' is variadic keyword"),
        (positional_only, "'item' is positional-only, but arguments are stored by name; remove the /"),
        (context_by_name, "cannot take the context by position"),
        (no_context, "cannot take the context by position"),
    ],
)
def test_parameters_that_cannot_be_stored_by_name_are_refused(
    function: Callable[..., None], words: str
) -> None:
    with pytest.raises(TaskDefinitionError) as refused:
        check_signature(function, skip_first=True)

    assert f"task {__name__}.{function.__name__}" in str(refused.value)
    assert words in str(refused.value)


def test_the_context_may_be_positional_only() -> None:
    def handler(ctx: object, /, item: int) -> None: ...

    assert Parameters.of(handler, skip_first=True).encode((1,), {}).text() == '{"item":1}'


# -- what is stored, and by whom


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("[]", "", "is list, not an object"),
        ("", "", "cannot be read (JSONDecodeError)"),
        ("NaN", "", "cannot be read (ValueError)"),
        ("1" * 5_000, "", "cannot be read (ValueError)"),
        ('{"order": ' + "[" * 100_000 + "]" * 100_000 + "}", "", "cannot be read (RecursionError)"),
        ("{}", "order", "not stored, but the task is send(order: int"),
        ('{"order": 1, "extra": 2}', "payload.extra", "stored, but the task is send(order: int"),
        ('{"order": 1, "a b": 2}', "payload['a b']", "stored, but the task is"),
        ('{"order": "1"}', "order", "expected int, got str"),
        ('{"order": 1.0}', "order", "expected int, got float 1.0"),
        ('{"order": null}', "order", "expected int, got None"),
        ('{"order": 1, "urgent": 1}', "urgent", "expected bool, got int 1"),
    ],
    ids=lambda each: each[:20],
)
def test_a_stored_payload_that_does_not_fit_the_handler_is_a_payload_error(
    text: str, path: str, words: str
) -> None:
    with pytest.raises(PayloadError) as refused:
        SEND.decode(text, no_load)

    assert refused.value.path == path
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("annotation", "value", "path"),
    [
        (datetime, "2026-01-01T00:00:00", "x"),
        (time, "10:00:00+01:00", "x"),
        (Decimal, "NaN", "x"),
        (timedelta, "5", "x"),
        (timedelta, "PT99999999999999S", "x"),
        (bytes, "a", "x"),
        (Color, "RED", "x"),
        (Color, [], "x"),
        (Rights, 8, "x"),
        (Literal["a"], {}, "x"),
        (float, "1", "x"),
        (float, 10**400, "x"),
        (set[Any], [[]], "x"),
        (list[int], [1, "2"], "x[1]"),
        (tuple[int, int], [1], "x"),
        (dict[int, int], {"01": 1}, "x['01']"),
        (dict[int, int], {"1": "1"}, "x['1']"),
        (dict[Decimal, int], {"1": 1, "1.0": 1}, "x['1.0']"),
        (Line, {"price": 1, "cost": 1}, "x.cost"),
        (Line, {"note": "a"}, "x"),
        (Order, {"lines": [{"price": "a"}], "when": "2026-01-01T00:00Z"}, "x.lines[0].price"),
        (Picky, {"total": -1}, "x"),
        (int | date, "a", "x"),
    ],
    ids=lambda each: str(each)[:30],
)
def test_a_stored_value_that_does_not_fit_its_annotation_is_refused_with_its_path(
    annotation: object, value: object, path: str
) -> None:
    with pytest.raises(PayloadError) as refused:
        arrive(annotation, value)

    assert refused.value.path == path


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (
            datetime,
            "2026-11-30T21:02:15.563583+00:00",
            datetime(2026, 11, 30, 21, 2, 15, 563583, UTC),
        ),  # to_jsonb(now())
        (datetime, "2026-01-01T00:00Z", datetime(2026, 1, 1, tzinfo=UTC)),
        (float, 1, 1.0),
        (Line, {"price": 2}, Line(2.0)),
        (Point, {"x": 1}, Point(1)),
        (Order, {"lines": [], "when": "2026-01-01T00:00Z"}, Order([], datetime(2026, 1, 1, tzinfo=UTC))),
        (timedelta, "PT90S", timedelta(seconds=90)),
        (timedelta, "-PT1.5S", timedelta(seconds=-1.5)),
    ],
)
def test_what_people_write_by_hand_is_understood(annotation: object, value: object, expected: object) -> None:
    assert identical(arrive(annotation, value), expected)


def test_nesting_beyond_what_python_can_walk_is_a_payload_error() -> None:
    with pytest.raises(PayloadError, match="x"):
        arrive(Tree, json.loads("[" * 900 + "]" * 900))


# -- definitions


def unsupported(annotation: object) -> str:
    with pytest.raises(TaskDefinitionError) as refused:
        plan(annotation)
    assert "handler: parameter 'x' is annotated" in str(refused.value)
    return str(refused.value)


@dataclass
class WithInitVar:
    name: str
    seed: InitVar[int]


class Unknown: ...


@dataclass
class Deep:
    unknown: Unknown


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (Unknown, "annotated Unknown: nothing here can carry it; pass its identity"),
        (list[Unknown | None], "nothing here can carry it"),
        (Deep, "nothing here can carry it"),
        (Callable[[], int], "nothing here can carry it"),
        (type[int], "nothing here can carry it"),
        (Iterator[int], "nothing here can carry it"),
        (OrderedDict[str, int], "nothing here can carry it"),
        (WithInitVar, "has an InitVar"),
        (dict[float, int], "neither all text nor all int"),
        (dict[tuple[int, int], int], "neither all text nor all int"),
        (dict[int | str, int], "neither all text nor all int"),
        (dict[bool, int], "neither all text nor all int"),
        (str | date, "date would never come back; put it first"),
        (str | Color, "Color would never come back"),
        (dict[str, Any] | Line, "Line would never come back"),
        (list[Any] | tuple[int, ...], "tuple would never come back"),
        (int | Level, "Level would never come back"),
        (Literal["r", Color.RED], "two values of"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_an_annotation_that_nothing_can_carry_is_a_definition_error(annotation: object, words: str) -> None:
    assert words in unsupported(annotation)


LATE = """
from __future__ import annotations
from dataclasses import dataclass
from typing import TYPE_CHECKING, NotRequired, Required, TypedDict
if TYPE_CHECKING:
    from nowhere import Context, Order, Result, date

def handler(
    ctx: Context, order: Order | None, later: list[Later], when: dict[date, Order], part: Part
) -> Result: ...

@dataclass
class Later:
    order: Order

class Part(TypedDict, total=False):
    size: int
    name: Required[str]

class Whole(TypedDict):
    size: NotRequired[int]
    name: str

def typed(part: Part | None = None, whole: Whole | None = None): ...

from datetime import date
"""


def late_module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("late")
    monkeypatch.setitem(sys.modules, "late", module)
    exec(LATE, module.__dict__)
    return module


def test_names_imported_for_type_checkers_only_come_from_localns(monkeypatch: pytest.MonkeyPatch) -> None:
    module = late_module(monkeypatch)

    # `date` exists in the module, beside an Order that does not: not the registry's class of that name.
    # Context and Result are never asked for.
    parameters = Parameters.of(
        module.handler, skip_first=True, hooks=[entity_hook], localns={"Order": Entity, "date": int}
    )

    day = {date(2026, 1, 1): Entity(3)}
    text = parameters.encode((Entity(1), [module.Later(Entity(2))], day, {"name": "a"}), {}).text()
    assert text == '{"order":1,"later":[{"order":2}],"when":{"2026-01-01":3},"part":{"name":"a"}}'


@pytest.mark.parametrize("name", ["part", "whole"])
def test_quoted_required_and_not_required_count(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    parameters = Parameters.of(late_module(monkeypatch).typed, skip_first=False)

    assert parameters.encode((), {name: {"name": "a"}}).text() == f'{{"{name}":{{"name":"a"}}}}'
    with pytest.raises(PayloadError, match=f"^{name}: .* lacks name"):
        parameters.encode((), {name: {"size": 1}})


def test_a_name_that_is_nowhere_is_a_definition_error_with_task_parameter_and_annotation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(TaskDefinitionError) as refused:
        Parameters.of(late_module(monkeypatch).handler, skip_first=True)

    start = "task late.handler: parameter 'order' is annotated Order | None: name 'Order' is not defined"
    assert str(refused.value).startswith(start)


def test_a_wrapped_function_is_read_in_its_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = late_module(monkeypatch)

    @functools.wraps(module.handler)
    def wrapper(*args: object) -> None: ...

    parameters = Parameters.of(wrapper, skip_first=True, hooks=[entity_hook], localns={"Order": Entity})

    assert parameters.task == "late.handler"


# -- entities


class Entity:
    def __init__(self, key: int | None) -> None:
        self.key = key

    def __eq__(self, other: object) -> bool:
        raise AssertionError("an entity is never compared")

    __hash__ = None  # type: ignore[assignment]


class EntityConverter:
    def encode(self, value: object, path: str) -> Json | Reference:
        if not isinstance(value, Entity):
            raise PayloadError(f"{path}: no entity", path=path)
        return value.key if value.key is not None else Reference(value, path)

    def decode(self, value: Json, path: str, load: Callable[[type, object], object]) -> object:
        return load(Entity, value)


def entity_hook(annotation: Any) -> EntityConverter | None:
    return EntityConverter() if annotation is Entity else None


@dataclass
class Basket:
    owner: Entity
    items: dict[str, list[Entity]]

    def __post_init__(self) -> None:
        assert isinstance(self.owner, Entity)


def test_a_hook_is_asked_at_every_depth_and_references_know_their_paths() -> None:
    def handler(one: Entity | None, many: list[Entity], basket: Basket) -> None: ...

    pending, known = Entity(None), Entity(7)
    parameters = Parameters.of(handler, skip_first=False, hooks=[entity_hook])

    encoded = parameters.encode(
        (None, [known, pending], Basket(pending, {"a": [known], "b c": [pending]})), {}
    )

    assert [leaf.path for leaf in encoded.references] == ["many[1]", "basket.owner", "basket.items['b c'][0]"]
    assert all(leaf.entity is pending for leaf in encoded.references)
    expected = '{"one":null,"many":[7,8],"basket":{"owner":8,"items":{"a":[7],"b c":[8]}}}'
    assert encoded.text(lambda leaf: 8) == expected


def test_entities_are_loaded_by_class_and_identity() -> None:
    def handler(one: Entity | None, many: list[Entity], none: Entity | None) -> None: ...

    parameters = Parameters.of(handler, skip_first=False, hooks=[entity_hook])

    given = parameters.decode(
        '{"one": 7, "many": [8, [1, "a"]], "none": null}', lambda cls, identity: (cls, identity)
    )

    assert given == {"one": (Entity, 7), "many": [(Entity, 8), (Entity, [1, "a"])], "none": None}


def test_what_loading_raises_is_not_wrapped() -> None:
    def gone(cls: type, identity: object) -> object:
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        plan(Basket, [entity_hook]).decode('{"x": {"owner": 1, "items": {}}}', gone)


def test_a_text_with_open_references_cannot_be_had() -> None:
    encoded = plan(Entity, [entity_hook]).encode((Entity(None),), {})

    with pytest.raises(TypeError, match="needs their identities"):
        encoded.text()


def test_an_identity_is_checked_like_any_value() -> None:
    encoded = plan(list[Entity], [entity_hook]).encode(([Entity(None)],), {})

    with pytest.raises(PayloadError, match="U\\+0000") as refused:
        encoded.text(lambda leaf: "a\x00")
    assert refused.value.path == "x[0]"


def test_the_limit_is_checked_at_the_call_and_again_with_the_identities() -> None:
    def handler(entity: Entity, text: str) -> None: ...

    parameters = Parameters.of(handler, skip_first=False, hooks=[entity_hook])
    room = LIMIT - len('{"entity":null,"text":""}')

    encoded = parameters.encode((Entity(None), "a" * room), {})

    with pytest.raises(PayloadError, match="262,145 bytes"):
        encoded.text(lambda leaf: 10_000)
    with pytest.raises(PayloadError, match="262,145 bytes"):
        parameters.encode((Entity(None), "a" * (room + 1)), {})


@pytest.mark.parametrize(
    "annotation", [Entity | int, Entity | str | None, TypeAliasType("E", Entity | None) | int]
)
def test_beside_an_entity_a_union_may_hold_none_only(annotation: object) -> None:
    with pytest.raises(TaskDefinitionError, match="only None can be told from"):
        plan(annotation, [entity_hook])


def test_entities_that_a_union_could_take_for_something_else_are_refused_at_the_call() -> None:
    parameters = plan(list[Entity] | list[int], [entity_hook])

    for entity in (Entity(None), Entity(1)):
        with pytest.raises(PayloadError, match="taken for another"):
            parameters.encode(([entity],), {})


def test_a_later_change_of_the_argument_does_not_reach_the_flush() -> None:
    def handler(entity: Entity, anything: dict[str, Any]) -> None: ...

    anything: dict[str, Any] = {"a": [1]}
    encoded = Parameters.of(handler, skip_first=False, hooks=[entity_hook]).encode(
        (Entity(None), anything), {}
    )

    anything["a"].append(NAN)

    assert encoded.text(lambda leaf: 1) == '{"entity":1,"anything":{"a":[1]}}'


# -- converters for the rest of the house


def test_a_converter_carries_one_annotation_for_keys() -> None:
    carry = converter(UUID)

    assert carry.encode(UUID(int=1), "id") == "00000000-0000-0000-0000-000000000001"
    assert carry.decode("00000000-0000-0000-0000-000000000001", "id", no_load) == UUID(int=1)
    with pytest.raises(PayloadError, match="order: expected UUID, got int 1"):
        carry.encode(1, "order")
    with pytest.raises(TaskDefinitionError, match="Unknown: nothing here can carry it"):
        converter(Unknown)


# -- any value of any type

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20)
WHOLE = st.integers() | st.integers(-(10**40), 10**40)
FLOAT = st.floats(allow_nan=False, allow_infinity=False).filter(
    lambda value: value != 0 or str(value) == "0.0"
)
ZONES = st.integers(-86_399, 86_399).map(lambda seconds: timezone(timedelta(seconds=seconds)))
INSTANT = st.datetimes(timezones=ZONES)
NUMBER = st.decimals(allow_nan=False, allow_infinity=False)
NATIVE = st.recursive(
    st.none() | st.booleans() | WHOLE | TEXT | FLOAT.filter(lambda value: abs(value) < 1e16),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=15,
)
LEAVES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (Any, NATIVE),
    (str, TEXT),
    (int, WHOLE),
    (float, FLOAT),
    (bool, st.booleans()),
    (datetime, INSTANT),
    (date, st.dates()),
    (time, st.times()),
    (timedelta, st.timedeltas()),
    (UUID, st.uuids()),
    (Decimal, NUMBER),
    (bytes, st.binary(max_size=30)),
    (Color, st.sampled_from(Color)),
    (Shape, st.sampled_from(Shape)),
    (Level, st.sampled_from(Level)),
    (Word, st.sampled_from(Word)),
    (Line, st.builds(Line, FLOAT, st.none() | TEXT)),
    (Point, st.builds(Point, WHOLE, WHOLE)),
]
GENERICS: tuple[Any, ...] = (
    list,
    tuple,
    dict,
    frozenset,
    Box,
)  # for subscripts that mypy cannot follow
LIST, TUPLE, DICT, FROZENSET, BOX = GENERICS
KEYS = [each for each in LEAVES if each[0] in (str, int, UUID, date, datetime, Color, Level, Word)]
HASHABLE = [each for each in LEAVES if each[0] not in (Any, Line)]


@st.composite
def typed(draw: st.DrawFn, depth: int = 2) -> tuple[Any, Any]:
    """An annotation and a value of it."""

    def strategy(depth: int) -> tuple[Any, st.SearchStrategy[Any]]:
        shape = draw(st.sampled_from(["leaf", "list", "tuple", "pair", "set", "dict", "optional", "box"]))
        if shape == "leaf" or depth == 0:
            leaf: tuple[Any, st.SearchStrategy[Any]] = draw(st.sampled_from(LEAVES))
            return leaf
        if shape == "set":
            inner, values = draw(st.sampled_from(HASHABLE))
            return FROZENSET[inner], st.frozensets(values, max_size=4)
        inner, values = strategy(depth - 1)
        if shape == "dict":
            key, keys = draw(st.sampled_from(KEYS))
            return DICT[key, inner], st.dictionaries(keys, values, max_size=4)
        if shape == "pair":
            other, others = strategy(depth - 1)
            return TUPLE[inner, other], st.tuples(values, others)
        if shape == "tuple":
            return TUPLE[inner, ...], st.lists(values, max_size=4).map(tuple)
        if shape == "box":
            return BOX[inner], st.builds(Box, values, st.lists(values, max_size=2))
        return (
            (LIST[inner], st.lists(values, max_size=4))
            if shape == "list"
            else (inner | None, st.none() | values)
        )

    annotation, values = strategy(depth)
    return annotation, draw(values)


@given(typed())
def test_whatever_is_accepted_comes_back_equal_and_of_the_same_type(pair: tuple[Any, Any]) -> None:
    annotation, value = pair

    assert identical(travel(annotation, value), value)


MEMBERS = [each for each in LEAVES if each[0] is not Any]


@given(st.data())
def test_a_union_gives_back_the_same_or_refuses(data: st.DataObject) -> None:
    members = data.draw(
        st.lists(st.sampled_from(MEMBERS), min_size=2, max_size=3, unique_by=lambda each: each[0])
    )
    value = data.draw(st.one_of([values for _, values in members]))
    union: Any = members[0][0]
    for annotation, _ in members[1:]:
        union |= annotation

    try:
        arrived = travel(union, value)
    except (PayloadError, TaskDefinitionError):
        return

    assert identical(arrived, value)


@given(st.recursive(st.none() | st.text() | st.floats() | st.binary() | WHOLE, lambda inner: st.lists(inner)))
def test_anything_under_any_comes_back_or_is_refused_with_a_path(value: Any) -> None:
    try:
        arrived = travel(Any, value)
    except PayloadError as error:
        refused = error
    else:
        assert identical(arrived, value)
        return

    assert refused.path.startswith("x")


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.sampled_from(LEAVES), ANY_JSON)
def test_whatever_is_stored_is_decoded_or_is_a_payload_error(leaf: tuple[Any, object], value: Any) -> None:
    for annotation in (leaf[0], LIST[leaf[0]], DICT[str, leaf[0]]):
        with suppress(PayloadError):  # and nothing else
            arrive(annotation, value)


# -- libraries that are not dependencies


def test_a_pydantic_model_comes_back_or_is_refused() -> None:
    pydantic = pytest.importorskip("pydantic")

    class Item(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        when: datetime
        price: float
        anything: Any = None

    class Guarded(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        password: pydantic.SecretStr  # type: ignore[name-defined]

    item = Item(when=datetime(2026, 1, 1, tzinfo=UTC), price=1e22)

    assert identical(travel(list[Item], [item]), [item])
    with pytest.raises(PayloadError, match=r"x: .*Item would not come back equal"):
        plan(Item).encode((Item(when=item.when, price=1, anything=date(2026, 1, 1)),), {})
    with pytest.raises(PayloadError, match="Guarded would not come back equal"):
        plan(Guarded).encode((Guarded(password=SECRET),), {})
    with pytest.raises(PayloadError, match=r"^x: no .*Item can be made") as refused:
        arrive(Item, {"when": SECRET, "price": 1})
    assert SECRET not in str(refused.value)


def test_a_msgspec_struct_comes_back_or_is_refused() -> None:
    msgspec = pytest.importorskip("msgspec")

    class Item(msgspec.Struct):  # type: ignore[misc, name-defined]
        when: datetime
        price: float
        by_number: dict[int, str]

    item = Item(datetime(2026, 1, 1, tzinfo=UTC), 1e22, {1: "a"})

    assert identical(travel(Item | None, item), item)
    with pytest.raises(PayloadError, match=r"^x: no .*Item can be made") as refused:
        arrive(Item, {"when": SECRET, "price": 1})
    assert SECRET not in str(refused.value)
    with pytest.raises(PayloadError, match="U\\+0000"):
        plan(Item).encode((Item(item.when, 1.0, {1: "\x00"}),), {})
