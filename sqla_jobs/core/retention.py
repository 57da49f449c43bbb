"""How long finished jobs are kept. Pure."""

from dataclasses import dataclass
from datetime import timedelta

from sqla_jobs.errors import ConfigurationError

__all__ = ["Retention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How long finished jobs are kept: zero deletes at once, None keeps for ever.

    (Failed jobs are looked through every ten minutes, so zero means within ten minutes for them.)

    `done` and `cancelled` jobs are kept in the archive, `failed` ones in the jobs table as dead letters.

    Raises `ConfigurationError` for a value that is not a duration, or a negative one.

    >>> Retention(done=timedelta(0)).keeps_done
    False
    """

    done: timedelta | None = timedelta(days=7)
    cancelled: timedelta | None = timedelta(days=7)
    failed: timedelta | None = timedelta(days=90)

    def __post_init__(self) -> None:
        for name in ("done", "cancelled", "failed"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, timedelta):
                raise ConfigurationError(
                    f"retention of {name} jobs must be a timedelta (or None: for ever), got {value!r}"
                )
            if value < timedelta(0):
                raise ConfigurationError(f"retention of {name} jobs must not be negative, got {value}")

    @property
    def keeps_done(self) -> bool:
        """Whether a done job is archived at all."""
        return self.done != timedelta(0)

    @property
    def keeps_cancelled(self) -> bool:
        """Whether a cancelled job is archived at all."""
        return self.cancelled != timedelta(0)

    def __str__(self) -> str:
        shown = ("for ever" if age is None else str(age) for age in (self.done, self.cancelled, self.failed))
        return "done {}, cancelled {}, failed {}".format(*shown)
