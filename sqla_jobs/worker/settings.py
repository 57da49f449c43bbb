"""What a worker is told: its options, checked when they are given."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, get_args

from sqla_jobs.core.call import check_name
from sqla_jobs.errors import ConfigurationError

__all__ = ["MODES", "Mode", "Settings", "queue_names"]

Mode = Literal["continuous", "drain", "once"]
MODES: tuple[Mode, ...] = get_args(Mode)

_SHORTEST_LEASE = timedelta(seconds=2)
_ZERO = timedelta(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of `Worker`. Raises `ConfigurationError` for a value that cannot work."""

    queues: tuple[str, ...]
    concurrency: int
    threads: int
    lease: timedelta
    poll_interval: timedelta
    drain_timeout: timedelta
    startup_timeout: timedelta
    mode: Mode
    max_jobs: int | None
    max_runtime: timedelta | None
    max_memory: int | None

    def __post_init__(self) -> None:
        for name in ("lease", "poll_interval", "drain_timeout", "startup_timeout"):
            value = getattr(self, name)
            if not isinstance(value, timedelta):
                raise ConfigurationError(f"{name} must be a timedelta, got {value!r}")
        for name in ("concurrency", "threads"):
            _check_count(name, getattr(self, name))
        for name in ("max_jobs", "max_memory"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        if self.lease < _SHORTEST_LEASE:
            raise ConfigurationError(f"lease must be at least {_SHORTEST_LEASE.seconds} s, got {self.lease}")
        if self.poll_interval <= _ZERO:
            raise ConfigurationError(f"poll_interval must be longer than 0, got {self.poll_interval}")
        if self.drain_timeout < _ZERO:
            raise ConfigurationError(f"drain_timeout must not be negative, got {self.drain_timeout}")
        if self.mode not in MODES:
            raise ConfigurationError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        limit: object = self.max_runtime
        if limit is not None and not (isinstance(limit, timedelta) and limit > _ZERO):
            raise ConfigurationError(f"max_runtime takes a timedelta above 0, or None, got {limit!r}")

    @property
    def poll(self) -> float:
        """Seconds."""
        return self.poll_interval.total_seconds()

    @property
    def deadline(self) -> float:
        """Seconds within which a statement of a lane must be answered: half a lease, from 1 to 10 s."""
        return min(max(self.lease.total_seconds() / 2, 1.0), 10.0)


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{name} must be at least 1, got {value!r}")


def queue_names(given: Iterable[str] | None, registered: Iterable[str]) -> tuple[str, ...]:
    """The queues to work: those given, or those of the registered tasks. Raises `ConfigurationError`.

    >>> queue_names(None, ["mail", "default", "mail"])
    ('default', 'mail')
    """
    if isinstance(given, str):
        raise ConfigurationError(f"queues takes several names, got one: write [{given!r}]")
    names = list(given or ()) or sorted(set(registered))
    return tuple(dict.fromkeys(check_name("queue", name) for name in names))
