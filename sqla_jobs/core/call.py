"""A call of a task that is to become a job: its kind, its arguments, and its options. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from sqla_jobs.core.payload import Encoded
from sqla_jobs.errors import ConfigurationError

__all__ = ["Call", "Options", "check_name"]

_SMALLINT = 2**15
#: PostgreSQL's timestamps end; nobody waits so long, and a typo in a unit should not fail at flush.
LONGEST = timedelta(days=36_525)
#: psycopg reads timestamps of the years 1 to 9999 only, in the zone of the server's choice.
_YEARS = range(2, 9_999)


def check_name(what: str, name: object, *, longest: int = 200) -> str:
    """A queue, kind or key that the database takes. Raises `ConfigurationError`."""
    if not isinstance(name, str):
        raise ConfigurationError(f"{what} must be a str, got {type(name).__name__}")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise ConfigurationError(f"{what} {name!r} holds a lone surrogate, which is not text") from None
    if "\0" in name:
        raise ConfigurationError(f"{what} {name!r} holds U+0000, which PostgreSQL cannot store")
    if not 1 <= size <= longest:
        raise ConfigurationError(f"{what} must have 1 to {longest:,} bytes, {name[:40]!r} has {size:,}")
    if not name.strip():
        raise ConfigurationError(f"{what} {name[:40]!r} is blank: nobody could tell it from a mistake")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a job is enqueued. Checked when made, so that nothing is refused at flush.

    `delay` counts from the moment of the INSERT by the database's clock; `run_at` is a moment with its
    time zone; `expires` is either, and a job not claimed by then is cancelled. While a job with the same
    queue and `unique_key` waits or runs, no second one is made. `columns` are values for columns of the
    user's own.
    """

    queue: str = "default"
    priority: int = 0
    delay: timedelta | None = None
    run_at: datetime | None = None
    expires: timedelta | datetime | None = None
    max_attempts: int = 20
    tags: tuple[str, ...] = ()
    unique_key: str | None = None
    columns: tuple[tuple[str, object], ...] = ()

    def __post_init__(self) -> None:
        check_name("queue", self.queue)
        if not _is_int(self.priority) or not -_SMALLINT <= self.priority < _SMALLINT:
            raise ConfigurationError(f"priority must fit a smallint (-32768 to 32767), got {self.priority!r}")
        if not _is_int(self.max_attempts) or not 1 <= self.max_attempts < 2**31:
            raise ConfigurationError(
                f"max_attempts must be an int from 1 to {2**31 - 1}, got {self.max_attempts!r}"
            )
        if self.delay is not None and self.run_at is not None:
            raise ConfigurationError("give delay or run_at, not both")
        _check_moment("delay", self.delay, timedelta)
        _check_moment("run_at", self.run_at, datetime)
        _check_moment("expires", self.expires, timedelta, datetime)
        for tag in self.tags:
            check_name("tag", tag)
        if _ends_before_it_begins(self):
            raise ConfigurationError(
                f"expires={self.expires!s} comes before the job is due ({self.delay or self.run_at!s}): "
                "it could never run"
            )
        if self.unique_key is not None:
            check_name("unique_key", self.unique_key, longest=2000)


def _ends_before_it_begins(options: "Options") -> bool:
    match options.expires, options.delay or options.run_at:
        case (timedelta() as expires, timedelta() as due) | (datetime() as expires, datetime() as due):
            return bool(expires <= due)  # type: ignore[operator]
    return False


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_TAKES = {timedelta: "a timedelta", datetime: "a datetime with a time zone"}


def _check_moment(name: str, value: object, *kinds: type) -> None:
    if value is None:
        return
    if not isinstance(value, kinds):
        takes = " or ".join(_TAKES[kind] for kind in kinds)
        raise ConfigurationError(f"{name} takes {takes}, got {type(value).__name__}")
    if isinstance(value, timedelta):
        if not timedelta(0) <= value <= LONGEST:
            raise ConfigurationError(f"{name} must lie between 0 and 100 years, got {value}")
    elif isinstance(value, datetime):
        if value.utcoffset() is None:
            raise ConfigurationError(
                f"{name} {value.isoformat()} has no time zone: which moment it means would depend on "
                "the session; use datetime.now(UTC) or .replace(tzinfo=ZoneInfo(...))"
            )
        if value.year not in _YEARS:
            raise ConfigurationError(f"{name} must lie in the years 2 to 9998, got {value.isoformat()}")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a task, ready to be written. `model` is the Job class that it becomes a row of.

    `late_key` makes its unique key, once the entities among its arguments have their identities.
    """

    kind: str
    arguments: Encoded
    options: Options
    model: Any = None
    late_key: Callable[[], str] | None = None

    def keyed(self) -> "Call":
        """With the unique key that it was waiting for. Raises `ConfigurationError` for one that cannot be."""
        if self.late_key is None:
            return self
        return replace(self, options=replace(self.options, unique_key=self.late_key()), late_key=None)
