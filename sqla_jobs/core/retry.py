"""How long a failed attempt waits before the next. Pure: chance is an argument.

Exponential backoff with jitter; the cap holds *after* the jitter, and no attempt number overflows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType

from sqla_jobs.errors import ConfigurationError

__all__ = ["Retry"]

Delay = timedelta | Callable[[BaseException, int], timedelta | None]
_ZERO = timedelta(0)
_LONGEST = timedelta(days=36_525)  # beyond it lies the end of PostgreSQL's calendar


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """When a failed attempt is tried again, and how often.

    Attempt n waits `delay * factor ** (n - 1)`, spread by `jitter` to both sides (0.5: from half to
    one and a half of it), and never longer than `cap`. The defaults wait 2, 4, 8 ... seconds up to an
    hour, 20 attempts in all, about nine hours on average.

    `give_up` names exceptions that are not tried again. `on` gives a delay of its own to an exception
    class (the nearest class in its method resolution order decides): a timedelta, or a function of the
    exception and the attempt that returns one, or None to give up.

    Raises `ConfigurationError` when a value cannot work.

    >>> Retry().wait(3, spread=0.5)
    datetime.timedelta(seconds=8)
    >>> Retry().wait(10_000, spread=0.99) <= Retry().cap
    True
    """

    max_attempts: int = 20
    delay: timedelta = timedelta(seconds=2)
    factor: float = 2.0
    cap: timedelta = timedelta(hours=1)
    jitter: float = 0.5
    give_up: tuple[type[BaseException], ...] = ()
    on: Mapping[type[BaseException], Delay] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        if not 1 <= self.max_attempts <= 2**31 - 1:
            raise ConfigurationError(
                f"max_attempts must be at least 1 and fit an int, got {self.max_attempts}"
            )
        for name in ("delay", "cap"):
            value = getattr(self, name)
            if not isinstance(value, timedelta):
                raise ConfigurationError(f"{name} must be a timedelta, got {value!r}")
        if self.delay < _ZERO or not _ZERO <= self.cap <= _LONGEST:
            raise ConfigurationError(
                "delay must not be negative, cap must lie between 0 and 100 years, "
                f"got {self.delay} and {self.cap}"
            )
        if not self.factor >= 1:
            raise ConfigurationError(f"factor must be 1 or more, got {self.factor}")
        if not 0 <= self.jitter <= 1:
            raise ConfigurationError(f"jitter must lie between 0 and 1, got {self.jitter}")
        self._check_rules()

    def _check_rules(self) -> None:
        # here, because a rule that cannot work would show only in the attempt that needs it
        give_up: object = self.give_up
        if not isinstance(give_up, tuple) or not all(map(_is_exception_class, give_up)):
            raise ConfigurationError(f"give_up must be a tuple of exception classes, got {give_up!r}")
        for cls, rule in self.on.items():
            if not _is_exception_class(cls):
                raise ConfigurationError(f"a key of on must be an exception class, got {cls!r}")
            if not (rule >= _ZERO if isinstance(rule, timedelta) else callable(rule)):
                raise ConfigurationError(
                    f"on[{cls.__name__}] must be a timedelta that is not negative, or a function of the "
                    f"exception and the attempt, got {rule!r} (give_up names what is not tried again)"
                )

    def wait(self, attempt: int, *, spread: float) -> timedelta:
        """How long to wait after failed attempt number `attempt` (from 1); `spread` in [0, 1)."""
        if not self.delay:
            return _ZERO  # not the cap, which zero times an overflow would give
        try:
            # a float, also of an int factor: 2 ** 10**9 would be computed in full
            seconds = self.delay.total_seconds() * float(self.factor) ** max(attempt - 1, 0)
        except OverflowError:
            return self.cap
        seconds *= 1 - self.jitter + 2 * self.jitter * spread
        # compared as float: a timedelta of 10^200 seconds cannot be made; NaN (infinity without any
        # spread) is not below the cap either
        return timedelta(seconds=seconds) if seconds < self.cap.total_seconds() else self.cap

    def wait_after(self, error: BaseException, attempt: int, *, spread: float) -> timedelta | None:
        """How long to wait after `error`; None gives up. A delay of `on` is taken as it is."""
        if isinstance(error, self.give_up):
            return None
        for cls in type(error).__mro__:
            rule = self.on.get(cls)
            if rule is None:
                continue
            return rule if isinstance(rule, timedelta) else rule(error, attempt)
        return self.wait(attempt, spread=spread)


def _is_exception_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)
