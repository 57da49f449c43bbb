"""What a handler sees of its job, and the ways to end that it raises."""

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import pytest
from sqlalchemy.orm import Session

from sqla_jobs.context import Attempt, Cancel, JobContext, RetryAfter, Snooze
from sqla_jobs.errors import ConfigurationError, LeaseLost

CENTURY = timedelta(days=36_525)


def context(
    *, attempt: int = 1, state: Attempt | None = None, open_session: Callable[[], Any] = Session, **given: Any
) -> JobContext:
    """The context of a job in the queue mail."""
    values: dict[str, Any] = {"id": 7, "queue": "mail", "kind": "shop.send", "max_attempts": 5} | given
    return JobContext(**values, attempt=attempt, open_session=open_session, state=state)


# -- endings


@pytest.mark.parametrize("ending", [Snooze, RetryAfter])
@pytest.mark.parametrize("delay", [timedelta(0), timedelta(microseconds=1), timedelta(minutes=5), CENTURY])
def test_an_ending_keeps_its_delay(ending: type[Snooze | RetryAfter], delay: timedelta) -> None:
    raised = ending(delay)

    assert raised.delay == delay
    assert str(delay) in str(raised)


@pytest.mark.parametrize("ending", [Snooze, RetryAfter])
@pytest.mark.parametrize("delay", [-timedelta(microseconds=1), 5, 1.5, "5m", None])
def test_a_delay_that_is_none_is_refused_with_its_value(
    ending: type[Snooze | RetryAfter], delay: Any
) -> None:
    reason = f"{ending.__name__} takes a timedelta that is not negative, got "

    with pytest.raises(ConfigurationError) as refused:
        ending(delay)

    assert str(refused.value) == reason + repr(delay)


@pytest.mark.parametrize("ending", [Snooze, RetryAfter])
@pytest.mark.parametrize("delay", [CENTURY + timedelta(seconds=1), timedelta.max])
def test_a_delay_past_the_end_of_time_is_refused(ending: type[Snooze | RetryAfter], delay: timedelta) -> None:
    with pytest.raises(ConfigurationError, match=f"{ending.__name__} takes a timedelta of at most 100 years"):
        ending(delay)


def test_cancel_keeps_its_reason() -> None:
    raised = Cancel("the order is gone")

    assert raised.reason == str(raised) == "the order is gone"


@pytest.mark.parametrize("reason", [None, 7, ValueError("gone")])
def test_a_reason_that_is_no_text_is_refused(reason: Any) -> None:
    with pytest.raises(ConfigurationError, match="Cancel takes its reason as a str, got "):
        Cancel(reason)


def test_an_ending_remembers_what_it_was_raised_from() -> None:
    cause = ConnectionError("smtp")

    with pytest.raises(RetryAfter) as raised:
        raise RetryAfter(timedelta(seconds=1)) from cause

    assert raised.value.__cause__ is cause


@pytest.mark.parametrize("ending", [Snooze, RetryAfter, Cancel])
def test_an_ending_passes_an_except_that_is_meant_for_errors_of_this_library(
    ending: type[Exception],
) -> None:
    assert not issubclass(ending, (ConfigurationError, LeaseLost, ValueError))


# -- the session


def test_the_session_is_opened_by_its_first_use_and_once() -> None:
    opened: list[object] = []

    def open_session() -> object:
        opened.append(made := object())
        return made

    ctx = context(open_session=open_session)
    before = list(opened)
    first, second = ctx.session, ctx.session

    assert before == []
    assert cast("object", first) is second
    assert opened == [first]


def test_a_session_that_could_not_be_opened_is_tried_again() -> None:
    answers = iter([OSError("no connection"), "session"])

    def open_session() -> object:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    ctx = context(open_session=open_session)
    with pytest.raises(OSError, match="no connection"):
        _ = ctx.session

    assert cast("object", ctx.session) == "session"


# -- the lease


def test_a_context_follows_the_state_of_its_attempt() -> None:
    state = Attempt()
    ctx = context(state=state)
    before = ctx.cancelled

    state.cancelled = True

    assert (before, ctx.cancelled) == (False, True)


def test_raise_if_lost_says_nothing_while_the_lease_is_held() -> None:
    context().raise_if_lost()
    context(state=Attempt(cancelled=True)).raise_if_lost()


def test_raise_if_lost_names_job_and_attempt() -> None:
    ctx = context(attempt=2, state=Attempt(lost=True))

    with pytest.raises(LeaseLost, match=r"job 7 \(shop.send\): the lease of attempt 2 is lost; another"):
        ctx.raise_if_lost()


# -- identity


def test_the_idempotency_key_is_the_same_in_every_attempt_and_no_other_jobs() -> None:
    key = context(attempt=1).idempotency_key

    assert key == context(attempt=2, max_attempts=9).idempotency_key
    others = {context(id=8).idempotency_key, context(queue="other").idempotency_key}
    assert key not in others
    assert len(others) == 2


def test_a_context_takes_no_attributes_of_the_users() -> None:
    with pytest.raises(AttributeError):
        context().tenant = "x"  # type: ignore[attr-defined]


# -- the log


def test_a_record_carries_the_job_and_the_fields_of_its_own_call(caplog: pytest.LogCaptureFixture) -> None:
    ctx = context(attempt=2)

    with caplog.at_level(logging.INFO):
        ctx.log.info("sent %d", 3, extra={"recipient": "ada", "attempt": "not theirs"})
        ctx.log.info("done")

    sent, _ = caplog.records
    assert (sent.name, sent.getMessage()) == ("sqla_jobs.task.shop.send", "sent 3")
    fields = [
        (vars(record)["job_id"], vars(record)["queue"], vars(record)["kind"], vars(record)["attempt"])
        for record in caplog.records
    ]
    assert fields == [(7, "mail", "shop.send", 2)] * 2
    assert vars(sent)["recipient"] == "ada"
