"""Options of a call are checked when they are given, so that nothing is refused at the flush."""

from datetime import UTC, date, datetime, timedelta, timezone
from enum import IntEnum, StrEnum
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from sqla_jobs.core.call import Options, check_name
from sqla_jobs.errors import ConfigurationError

SECOND = timedelta(seconds=1)
CENTURY = timedelta(days=36_525)
AWARE = datetime(2031, 5, 17, 12, 30, tzinfo=UTC)


class Mail(StrEnum):
    FAST = "fast"


class Urgency(IntEnum):
    HIGH = 10


# Table V2 of the field reports: the names that broke other queues.
GOOD_NAMES = [
    "q" * 63,
    "q" * 64,
    "q" * 63 + "a",
    "é" * 32,
    "default",
    "select",
    "user",
    "MyQueue",
    "myqueue",
    "a.b",
    "a:b",
    "a-b",
    "a/b",
    "a b",
    'x"; drop table canary; --',
    "x'); select pg_sleep(5); --",
    "100%",
    "%s",
    "%(x)s",
    "{0}",
    ":p",
    "a\\b",
    "a\nb",
    "a\tb",
    "😀",
    "队列",
    "e\u0301",
    "\u00e9",
    "q" * 200,
    "é" * 100,
    "😀" * 50,
    Mail.FAST,
]
BAD_NAMES: list[tuple[Any, str]] = [
    ("", "must have 1 to 200 bytes, '' has 0"),
    ("q" * 201, "must have 1 to 200 bytes, 'q+' has 201"),
    ("é" * 101, "must have 1 to 200 bytes, .* has 202"),
    ("   ", "is blank"),
    ("a\x00b", r"holds U\+0000, which PostgreSQL cannot store"),
    ("a\ud800b", "holds a lone surrogate, which is not text"),
    (None, "must be a str, got NoneType"),
    (7, "must be a str, got int"),
    (b"mail", "must be a str, got bytes"),
]


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_a_name_that_postgresql_stores_is_taken_as_it_is(name: str) -> None:
    assert check_name("queue", name) == name
    assert Options(queue=name, tags=(name,)).queue == name


@pytest.mark.parametrize(("name", "reason"), BAD_NAMES)
@pytest.mark.parametrize("what", ["queue", "tag"])
def test_a_name_that_postgresql_cannot_store_is_refused(what: str, name: Any, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{what} .*{reason}"):
        Options(**{"queue": name} if what == "queue" else {"tags": (name,)})


def test_a_long_name_is_not_repeated_in_full() -> None:
    with pytest.raises(ConfigurationError) as refused:
        check_name("kind", "k" * 10_000)

    assert len(str(refused.value)) < 120


GOOD: list[dict[str, Any]] = [
    {},
    {"priority": -(2**15)},
    {"priority": 2**15 - 1},
    {"priority": Urgency.HIGH},
    {"max_attempts": 1},
    {"max_attempts": 2**31 - 1},
    {"delay": timedelta(0)},
    {"delay": CENTURY},
    {"expires": timedelta(0)},
    {"expires": CENTURY},
    {"expires": AWARE},
    {"run_at": AWARE},
    {"run_at": AWARE.replace(tzinfo=ZoneInfo("Pacific/Kiritimati"))},
    {"run_at": datetime(1999, 1, 1, tzinfo=UTC)},
    {"run_at": datetime(2, 1, 1, tzinfo=timezone(timedelta(hours=14)))},
    {"run_at": datetime(9998, 12, 31, 23, 59, tzinfo=timezone(-timedelta(hours=12)))},
    {"run_at": AWARE, "expires": timedelta(days=1)},
    {"delay": SECOND, "expires": AWARE},
    {"tags": ("a", "a")},
]


@pytest.mark.parametrize("given", GOOD, ids=str)
def test_what_can_work_is_kept_as_given(given: dict[str, Any]) -> None:
    options = Options(**given)

    assert {name: getattr(options, name) for name in given} == given


SMALLINT = r"priority must fit a smallint \(-32768 to 32767\), got "
ATTEMPTS = "max_attempts must be an int from 1 to 2147483647, got "
ZONE = r"has no time zone: .* use datetime\.now\(UTC\)"

BAD: list[tuple[dict[str, Any], str]] = [
    ({"priority": 2**15}, SMALLINT + "32768"),
    ({"priority": -(2**15) - 1}, SMALLINT + "-32769"),
    ({"priority": True}, SMALLINT + "True"),
    ({"priority": 1.5}, SMALLINT + "1.5"),
    ({"priority": "high"}, SMALLINT + "'high'"),
    ({"priority": None}, SMALLINT + "None"),
    ({"max_attempts": 0}, ATTEMPTS + "0"),
    ({"max_attempts": -1}, ATTEMPTS + "-1"),
    ({"max_attempts": 2**31}, ATTEMPTS + "2147483648"),
    ({"max_attempts": True}, ATTEMPTS + "True"),
    ({"max_attempts": 2.0}, ATTEMPTS + "2.0"),
    ({"delay": SECOND, "run_at": AWARE}, "give delay or run_at, not both"),
    ({"delay": timedelta(0), "run_at": AWARE}, "give delay or run_at, not both"),
    ({"delay": -SECOND}, "delay must lie between 0 and 100 years, got -1 day, 23:59:59"),
    ({"delay": CENTURY + SECOND}, "delay must lie between 0 and 100 years"),
    ({"delay": timedelta.max}, "delay must lie between 0 and 100 years"),
    ({"delay": 5}, "delay takes a timedelta, got int"),
    ({"delay": AWARE}, "delay takes a timedelta, got datetime"),
    ({"run_at": SECOND}, "run_at takes a datetime with a time zone, got timedelta"),
    ({"run_at": date(2031, 5, 17)}, "run_at takes a datetime with a time zone, got date"),
    ({"run_at": "2031-05-17T12:30:00Z"}, "run_at takes a datetime with a time zone, got str"),
    ({"run_at": 1_900_000_000}, "run_at takes a datetime with a time zone, got int"),
    ({"run_at": AWARE.replace(tzinfo=None)}, f"run_at 2031-05-17T12:30:00 {ZONE}"),
    ({"run_at": datetime.max.replace(tzinfo=UTC)}, "run_at must lie in the years 2 to 9998, got 9999-12-31"),
    ({"run_at": datetime.min.replace(tzinfo=UTC)}, "run_at must lie in the years 2 to 9998, got 0001-01-01"),
    ({"expires": AWARE.replace(tzinfo=None)}, f"expires 2031-05-17T12:30:00 {ZONE}"),
    ({"expires": -SECOND}, "expires must lie between 0 and 100 years"),
    ({"expires": 60}, "expires takes a timedelta or a datetime with a time zone, got int"),
]


@pytest.mark.parametrize(("given", "reason"), BAD, ids=str)
def test_what_cannot_work_is_refused_with_its_value(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        Options(**given)


def test_the_defaults_are_those_of_the_table() -> None:
    options = Options()

    assert (options.queue, options.priority, options.max_attempts, options.tags) == ("default", 0, 20, ())
    assert (options.delay, options.run_at, options.expires) == (None, None, None)
