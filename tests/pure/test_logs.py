"""Events as log records."""

import json
import logging
from collections.abc import Iterator

import pytest

from sqla_jobs.core.leases import Lease
from sqla_jobs.core.lifecycle import JobStatus, Verdict
from sqla_jobs.events import EVENTS, Events
from sqla_jobs.store.claim import ClaimedJob
from sqla_jobs.telemetry.logs import _Json, _Text, log_events

JOB = ClaimedJob(Lease("mail", 7, 2, "w"), "app.send", '{"password": "secret"}', 2, 3, 0, 0.0)


@pytest.fixture
def events() -> Iterator[Events]:
    """Events that are logged."""
    made = Events()
    stop = log_events(made)
    yield made
    stop()


def level_of(caplog: pytest.LogCaptureFixture, events: Events, verdict: Verdict) -> tuple[str, str]:
    """How a verdict is logged."""
    caplog.set_level(logging.DEBUG, "sqla_jobs")
    events.emit("job.settled", settled=[(JOB, verdict)])
    [record] = caplog.records
    return record.levelname, record.getMessage()


@pytest.mark.parametrize(
    ("verdict", "logged"),
    [
        (Verdict(JobStatus.DONE), ("DEBUG", "job.done")),
        (Verdict(JobStatus.READY, error="ValueError: x"), ("WARNING", "job.retried")),
        (Verdict(JobStatus.FAILED, error="ValueError: x"), ("ERROR", "job.failed")),
        (Verdict(JobStatus.CANCELLED, error="no"), ("INFO", "job.cancelled")),
        (Verdict(JobStatus.READY, attempts=-1), ("INFO", "job.given_back")),
    ],
)
def test_only_a_job_that_fails_for_good_is_an_error(
    caplog: pytest.LogCaptureFixture, events: Events, verdict: Verdict, logged: tuple[str, str]
) -> None:
    assert level_of(caplog, events, verdict) == logged


def test_a_record_carries_fields_and_the_first_line_of_the_error_but_no_payload(
    caplog: pytest.LogCaptureFixture, events: Events
) -> None:
    level_of(caplog, events, Verdict(JobStatus.FAILED, error="ValueError: x\n\n  File secret"))

    text = _Text().format(caplog.records[0])
    entry = json.loads(_Json().format(caplog.records[0]))

    assert text.endswith('error   job.failed job=7 queue=mail kind=app.send attempt=2 error="ValueError: x"')
    assert (entry["job"], entry["kind"], entry["attempt"]) == (7, "app.send", 2)
    assert entry["error"] == "ValueError: x"
    assert "secret" not in text + str(entry)


def test_every_event_can_be_logged(caplog: pytest.LogCaptureFixture, events: Events) -> None:
    samples: dict[str, object] = {"settled": [], "jobs": [], "queues": ("a", "b"), "kinds": []}
    caplog.set_level(logging.DEBUG, "sqla_jobs")

    for name, fields in EVENTS.items():
        events.emit(name, **{field: samples.get(field, "x y") for field in fields})

    assert not [record for record in caplog.records if "failed" in record.getMessage()]
    assert all(_Text().format(record) for record in caplog.records)
