"""Which leases a worker holds and which are due for prolongation. Pure: time is an argument.

All times are the worker's own monotonic clock, taken *before* the statement was sent, so that the
worker always thinks a lease ends earlier than the database does. Not thread-safe by itself.
"""

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Lease", "LeaseBook"]


class Lease(NamedTuple):  # a tuple: one is made per claimed job
    """The proof of ownership of one attempt: every write that ends or prolongs it carries all four."""

    queue: str
    id: int
    token: int
    owner: str


class LeaseBook:
    """The leases that are open, and when each ends.

    >>> book = LeaseBook(lease=60)
    >>> book.opened([Lease("mail", 7, 1, "w")], sent=100)
    >>> book.due(now=139), book.due(now=140)
    ([], [Lease(queue='mail', id=7, token=1, owner='w')])
    """

    def __init__(self, *, lease: float) -> None:
        self._lease = lease
        self._ends: dict[Lease, float] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, lease: Lease) -> bool:
        return lease in self._ends

    def opened(self, leases: Iterable[Lease], *, sent: float) -> None:
        """They were claimed by a statement sent at `sent`."""
        end = sent + self._lease
        for lease in leases:
            self._ends[lease] = end

    def prolonged(self, leases: Iterable[Lease], *, sent: float) -> None:
        """They were prolonged; one that was closed meanwhile stays closed."""
        end = sent + self._lease
        for lease in leases:
            if lease in self._ends:
                self._ends[lease] = end

    def closed(self, leases: Iterable[Lease]) -> None:
        """Their outcome is written, or they are lost: nothing is to be prolonged any more."""
        for lease in leases:
            self._ends.pop(lease, None)

    def open(self) -> set[Lease]:
        """All of them."""
        return set(self._ends)

    def due(self, now: float) -> list[Lease]:
        """Those with a third of their lease left, or less."""
        limit = now + self._lease / 3
        return [lease for lease, end in self._ends.items() if end <= limit]

    def ended(self, now: float) -> list[Lease]:
        """Those that ended by the worker's own clock: somebody else may run the job by now."""
        return [lease for lease, end in self._ends.items() if end <= now]

    def first_end(self) -> float | None:
        """When the first of them ends; None when nothing is open."""
        return min(self._ends.values(), default=None)

    def pause(self, now: float) -> float:
        """Seconds until the next look: when the first becomes due, at most a sixth of a lease."""
        longest = self._lease / 6
        if not self._ends:
            return longest
        return min(longest, max(0.0, min(self._ends.values()) - self._lease / 3 - now))
