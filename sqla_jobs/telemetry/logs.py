"""Events as log records: one line per fact, named by the event, with its fields.

Never logs a payload, and of an error only its first line. A failure that will be retried is a warning;
an error is only what needs a person.
"""

import json
import logging
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, Literal

from sqla_jobs.core.lifecycle import JobStatus, Verdict
from sqla_jobs.events import Event, Events

__all__ = ["FORMATS", "configure", "log_events"]

Format = Literal["text", "json"]
FORMATS: tuple[Format, ...] = ("text", "json")

_log = logging.getLogger("sqla_jobs")
Record = tuple[int, str, dict[str, object]]

_LEVELS = {
    "worker.started": logging.INFO,
    "worker.draining": logging.INFO,
    "worker.stopped": logging.INFO,
    "worker.recycling": logging.WARNING,
    "queue.without_task": logging.WARNING,
    "pool.small": logging.WARNING,
    "process.ended": logging.WARNING,
    "job.unknown_kind": logging.WARNING,
    "job.time_limit": logging.WARNING,
    "job.stuck": logging.ERROR,
    "job.running_long": logging.WARNING,
    "session.open_long": logging.WARNING,
    "result.refused": logging.WARNING,
    "delay.refused": logging.WARNING,
    "lease.lost": logging.WARNING,
    "listen.connected": logging.INFO,
    "listen.lost": logging.WARNING,
    "listen.unavailable": logging.WARNING,
    "database.error": logging.WARNING,
    "claim.refused": logging.ERROR,
    "purge.refused": logging.WARNING,
    "archive.refused": logging.WARNING,
    "outcome.refused": logging.ERROR,
    "loop.crashed": logging.ERROR,
}


def log_events(events: Events) -> Callable[[], None]:
    """Write a log record for every event; returns how to stop it."""
    return events.subscribe(_write)


def _write(event: Event) -> None:
    for level, name, fields in _records(event):
        if _log.isEnabledFor(level):
            _log.log(level, name, extra={"event": name, "fields": fields})


def _records(event: Event) -> Iterable[Record]:
    fields = event.fields
    match event.name:
        case "job.settled":
            settled: Any = fields["settled"]
            yield from (_settled(job, verdict) for job, verdict in settled)
        case "job.rescued":
            rescued: Any = fields["jobs"]
            for lease, verdict in rescued:
                known = {"job": lease.id, "queue": lease.queue, "lost_worker": lease.owner}
                yield logging.WARNING, "job.rescued", known | {"status": verdict.status.value}
        case "job.claimed":
            jobs: Any = fields["jobs"]
            if jobs:
                yield logging.DEBUG, "job.claimed", {"queue": jobs[0].lease.queue, "count": len(jobs)}
        case "job.released":
            released: Any = fields["jobs"]
            count = released if isinstance(released, int) else len(released)
            yield logging.INFO, "job.released", {"count": count, "reason": fields["reason"]}
        case "job.expired":
            expired: Any = fields["jobs"]
            yield from ((logging.INFO, "job.expired", {"job": job}) for job in expired)
        case "pooler.detected":
            yield logging.WARNING if fields["advice"] else logging.INFO, "pooler.detected", fields
        case name:
            yield _LEVELS.get(name, logging.INFO), name, fields


def _settled(job: Any, verdict: Verdict) -> Record:
    fields: dict[str, object] = {
        "job": job.lease.id,
        "queue": job.lease.queue,
        "kind": job.kind,
        "attempt": job.attempt,
    }
    if verdict.error is not None:
        fields["error"] = verdict.error.partition("\n")[0]
    match verdict.status:
        case JobStatus.DONE:
            return logging.DEBUG, "job.done", fields
        case JobStatus.FAILED:
            return logging.ERROR, "job.failed", fields
        case JobStatus.CANCELLED:
            return logging.INFO, "job.cancelled", fields
    if verdict.delay is not None:
        fields["retry_in"] = round(verdict.delay.total_seconds(), 3)
    if verdict.error is None:
        return logging.INFO, "job.given_back", fields
    return logging.WARNING, "job.retried", fields


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = getattr(record, "fields", {})
        pairs = " ".join(f"{name}={_plain(value)}" for name, value in fields.items())
        when = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S")
        line = f"{when} {record.levelname.lower():7} {record.getMessage()}"
        line = f"{line} {pairs}" if pairs else line
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= getattr(record, "fields", {})
        for name in ("job_id", "queue", "kind", "attempt"):
            if hasattr(record, name):
                entry[name] = getattr(record, name)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value)) or "-"
    text = str(value)
    return json.dumps(text) if not text or any(c in text for c in ' "\n=') else text


def configure(*, level: str, form: Format) -> None:
    """Log to stderr; for a worker that is a program of its own. A library never does this."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(level.upper())
