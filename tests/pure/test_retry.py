"""core.retry: how long a failed attempt waits. The tables are worked out by hand."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sqla_jobs.core.retry import Retry
from sqla_jobs.errors import ConfigurationError

HOUR = timedelta(hours=1)


def seconds(value: float) -> timedelta:
    return timedelta(seconds=value)


# 2^n seconds, of which a spread of 0 takes half, 0.5 all and 0.999 the factor 1.499; 2^12 is over an hour
BY_HAND = [
    # attempt, at spread 0, at 0.5, at 0.999
    (1, 1, 2, 2.998),
    (2, 2, 4, 5.996),
    (3, 4, 8, 11.992),
    (4, 8, 16, 23.984),
    (5, 16, 32, 47.968),
    (6, 32, 64, 95.936),
    (7, 64, 128, 191.872),
    (8, 128, 256, 383.744),
    (9, 256, 512, 767.488),
    (10, 512, 1024, 1534.976),
    (11, 1024, 2048, 3069.952),
    (12, 2048, 3600, 3600),
    (13, 3600, 3600, 3600),
    (20, 3600, 3600, 3600),
]


@pytest.mark.parametrize(("attempt", "least", "middle", "most"), BY_HAND)
def test_the_default_waits_double_from_two_seconds_to_an_hour_after_jitter(
    attempt: int, least: float, middle: float, most: float
) -> None:
    retry = Retry()

    waits = [retry.wait(attempt, spread=spread) for spread in (0.0, 0.5, 0.999)]

    assert waits == [seconds(least), seconds(middle), seconds(most)]


def test_the_cap_cuts_the_spread_delay_and_not_the_plain_one() -> None:
    # capped before the jitter, an hour and a half of the spread would come out as up to 90 minutes
    retry = Retry(delay=timedelta(minutes=50), factor=1)

    waits = [retry.wait(1, spread=spread) for spread in (0.0, 0.5, 0.999)]

    assert waits == [timedelta(minutes=25), timedelta(minutes=50), HOUR]


def test_without_jitter_the_spread_changes_nothing() -> None:
    retry = Retry(delay=seconds(10), factor=3, jitter=0)

    waits = [retry.wait(attempt, spread=0.9) for attempt in (1, 2, 3)]

    assert waits == [seconds(10), seconds(30), seconds(90)]


def test_full_jitter_reaches_from_zero_to_twice_the_delay() -> None:
    retry = Retry(delay=seconds(10), jitter=1)

    waits = [retry.wait(1, spread=spread) for spread in (0.0, 0.5, 0.75)]

    assert waits == [seconds(0), seconds(10), seconds(15)]


@pytest.mark.parametrize("attempt", [1_023, 1_024, 1_025, 10_000, 10**6, 2**31 - 1])
@pytest.mark.parametrize("factor", [2, 2.0, 1.5, float("inf")])
@pytest.mark.parametrize("jitter", [0.0, 0.5, 1.0])
def test_no_attempt_number_overflows(attempt: int, factor: float, jitter: float) -> None:
    retry = Retry(factor=factor, jitter=jitter)

    wait = retry.wait(attempt, spread=0.5)

    assert wait == HOUR


@pytest.mark.parametrize("attempt", [1_024, 10_000])
def test_infinity_without_any_spread_is_a_wait_all_the_same(attempt: int) -> None:
    # 2 * 2.0**1023 is infinity without an OverflowError, and infinity * 0 is not a number
    retry = Retry(jitter=1)

    wait = retry.wait(attempt, spread=0.0)

    assert seconds(0) <= wait <= HOUR


@pytest.mark.parametrize("attempt", [1, 1_023, 1_025, 10_000, 10**6])
def test_a_delay_of_zero_stays_zero_at_every_attempt(attempt: int) -> None:
    retry = Retry(delay=timedelta(0))

    wait = retry.wait(attempt, spread=0.9)

    assert wait == timedelta(0)


def test_an_attempt_before_the_first_waits_like_the_first() -> None:
    assert Retry().wait(0, spread=0.5) == Retry().wait(1, spread=0.5) == seconds(2)


@settings(max_examples=500, deadline=None)
@given(
    delay=st.timedeltas(min_value=timedelta(0)),
    cap=st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=36_525)),
    factor=st.one_of(st.integers(1, 10), st.floats(min_value=1, allow_nan=False)),
    jitter=st.floats(0, 1),
    attempt=st.integers(0, 2**31 - 1),
    spread=st.floats(0, 1, exclude_max=True),
)
def test_no_wait_is_negative_or_above_the_cap(
    delay: timedelta, cap: timedelta, factor: float, jitter: float, attempt: int, spread: float
) -> None:
    retry = Retry(delay=delay, cap=cap, factor=factor, jitter=jitter)

    wait = retry.wait(attempt, spread=spread)

    assert timedelta(0) <= wait <= cap


# -- what an exception changes


class Flaky(Exception):
    """Base of a small family, to see which relative decides."""


class Slow(Flaky):
    pass


class VerySlow(Slow):
    pass


class Other(Exception):
    pass


class Both(Other, VerySlow):
    pass


def test_an_exception_without_a_rule_waits_the_backoff() -> None:
    retry = Retry(on={Slow: seconds(7)}, give_up=(Other,))

    wait = retry.wait_after(ValueError("x"), 3, spread=0.5)

    assert wait == seconds(8)


@pytest.mark.parametrize("error", [Other(), Both()])
def test_what_give_up_names_is_not_tried_again_nor_are_its_subclasses(error: Exception) -> None:
    retry = Retry(give_up=(KeyError, Other))

    assert retry.wait_after(error, 1, spread=0.5) is None


def test_give_up_goes_before_a_delay_of_its_own() -> None:
    retry = Retry(give_up=(Flaky,), on={Slow: seconds(7)})

    assert retry.wait_after(Slow(), 1, spread=0.5) is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [(Flaky(), 5), (Slow(), 7), (VerySlow(), 7), (Both(), 11)],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_the_nearest_class_in_the_method_resolution_order_decides(error: Exception, expected: int) -> None:
    # Both: its order is Both, Other, VerySlow, Slow, Flaky
    retry = Retry(on={Flaky: seconds(5), Other: seconds(11), Slow: seconds(7)})

    wait = retry.wait_after(error, 1, spread=0.5)

    assert wait == seconds(expected)


def test_a_delay_of_its_own_is_neither_spread_nor_capped() -> None:
    retry = Retry(on={Slow: timedelta(days=2)})

    wait = retry.wait_after(Slow(), 1, spread=0.0)

    assert wait == timedelta(days=2)


def test_a_delay_of_zero_is_a_rule_and_not_the_absence_of_one() -> None:
    retry = Retry(on={Slow: timedelta(0), Flaky: seconds(5)})

    wait = retry.wait_after(Slow(), 1, spread=0.5)

    assert wait == timedelta(0)


def test_a_function_is_told_the_exception_and_the_attempt() -> None:
    told: list[tuple[BaseException, int]] = []

    def rule(error: BaseException, attempt: int) -> timedelta:
        told.append((error, attempt))
        return seconds(attempt * 10)

    retry = Retry(on={Flaky: rule})
    error = Slow()

    wait = retry.wait_after(error, 4, spread=0.5)

    assert (wait, told) == (seconds(40), [(error, 4)])


def test_a_function_that_returns_none_gives_up_and_asks_no_other_rule() -> None:
    retry = Retry(on={Slow: lambda error, attempt: None, Flaky: seconds(5)})

    assert retry.wait_after(VerySlow(), 1, spread=0.5) is None


# -- construction


def not_a_class(error: BaseException) -> None:
    """Looks like what `on` takes as a value, and is given where a class belongs."""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_attempts": 0}, "max_attempts must be at least 1 and fit an int, got 0"),
        ({"max_attempts": -3}, "got -3"),
        ({"max_attempts": 2**31}, "got 2147483648"),
        (
            {"delay": seconds(-1)},
            "delay must not be negative, cap must lie between 0 and 100 years, got -1 day",
        ),
        ({"cap": seconds(-2)}, "cap must lie between 0 and 100 years, got 0:00:02 and -1 day, 23:59:58"),
        ({"cap": timedelta.max}, "cap must lie between 0 and 100 years, got 0:00:02 and 999999999 days"),
        ({"delay": 2}, "delay must be a timedelta, got 2"),
        ({"cap": 3600.0}, "cap must be a timedelta, got 3600.0"),
        ({"factor": 0.99}, "factor must be 1 or more, got 0.99"),
        ({"factor": float("nan")}, "factor must be 1 or more, got nan"),
        ({"jitter": -0.1}, "jitter must lie between 0 and 1, got -0.1"),
        ({"jitter": 1.1}, "jitter must lie between 0 and 1, got 1.1"),
        ({"jitter": float("nan")}, "jitter must lie between 0 and 1, got nan"),
        ({"give_up": Slow}, "give_up must be a tuple of exception classes, got <class"),
        ({"give_up": [Slow]}, "give_up must be a tuple of exception classes, got [<class"),
        ({"give_up": ("Slow",)}, "give_up must be a tuple of exception classes, got ('Slow',)"),
        ({"on": {"Slow": seconds(1)}}, "a key of on must be an exception class, got 'Slow'"),
        ({"on": {not_a_class: seconds(1)}}, "a key of on must be an exception class, got <function"),
        ({"on": {Slow: 5}}, "on[Slow] must be a timedelta that is not negative, or a function"),
        ({"on": {Slow: seconds(-5)}}, "got datetime.timedelta(days=-1, seconds=86395)"),
        ({"on": {Slow: None}}, "got None (give_up names what is not tried again)"),
    ],
)
def test_a_value_that_cannot_work_is_named_at_construction(options: dict[str, Any], message: str) -> None:
    build: Callable[..., Retry] = Retry

    with pytest.raises(ConfigurationError) as caught:
        build(**options)

    assert message in str(caught.value)


def test_the_defaults_are_those_of_the_design() -> None:
    retry = Retry()

    assert (retry.max_attempts, retry.delay, retry.factor, retry.cap, retry.jitter) == (
        20,
        seconds(2),
        2,
        HOUR,
        0.5,
    )


def test_twenty_attempts_take_about_nine_hours_on_average() -> None:
    retry = Retry()

    total = sum((retry.wait(n, spread=0.5) for n in range(1, retry.max_attempts)), timedelta(0))

    # 2 + 4 + ... + 2048 = 4094 s, then eight times an hour
    assert total == seconds(4094 + 8 * 3600)


def test_a_policy_cannot_be_changed_after_it_was_checked() -> None:
    retry = Retry()

    with pytest.raises(AttributeError):
        retry.max_attempts = 0  # type: ignore[misc]
