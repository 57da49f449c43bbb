"""core.retention: how long finished jobs are kept."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from sqla_jobs.core.retention import Retention
from sqla_jobs.errors import ConfigurationError


def test_the_defaults_are_a_week_for_what_ended_well_and_ninety_days_for_failures() -> None:
    retention = Retention()

    kept = (retention.done, retention.cancelled, retention.failed)

    assert kept == (timedelta(days=7), timedelta(days=7), timedelta(days=90))


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (timedelta(0), False),
        (timedelta(microseconds=1), True),
        (timedelta(days=7), True),
        (None, True),  # for ever
    ],
)
def test_only_zero_keeps_nothing(value: timedelta | None, kept: bool) -> None:
    retention = Retention(done=value, cancelled=value)

    assert (retention.keeps_done, retention.keeps_cancelled) == (kept, kept)


def test_done_and_cancelled_are_decided_apart() -> None:
    retention = Retention(done=timedelta(0))

    assert (retention.keeps_done, retention.keeps_cancelled) == (False, True)


@pytest.mark.parametrize("name", ["done", "cancelled", "failed"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (timedelta(days=-1), "retention of {name} jobs must not be negative, got -1 day, 0:00:00"),
        (7, "retention of {name} jobs must be a timedelta (or None: for ever), got 7"),
    ],
)
def test_a_value_that_cannot_work_is_named_at_construction(name: str, value: Any, message: str) -> None:
    build: Callable[..., Retention] = Retention

    with pytest.raises(ConfigurationError) as caught:
        build(**{name: value})

    assert str(caught.value) == message.format(name=name)


def test_it_says_what_it_keeps() -> None:
    assert str(Retention(failed=None)) == "done 7 days, 0:00:00, cancelled 7 days, 0:00:00, failed for ever"
