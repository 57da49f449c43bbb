"""Named events with fields. Anyone may subscribe; the emitter knows nobody.

An event is a fact that has happened (`job.settled`, `lease.lost`). Work that comes in batches is
told in batches: one event carries many jobs. Listeners are called at once, in the thread that
emits; one that raises is logged and left out of nothing else. Stores nothing, formats nothing.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["EVENTS", "Event", "Events", "Listener"]

#: Every event there is: name -> its fields.
EVENTS: Mapping[str, tuple[str, ...]] = {
    "worker.started": ("worker", "queues", "concurrency", "kinds", "retention"),
    "queue.without_task": ("queue",),
    "pool.small": ("engine", "connections", "wanted"),
    "worker.quiet": ("worker", "quiet"),
    "worker.recycling": ("worker", "reason"),
    "worker.draining": ("worker", "open", "seconds"),
    "worker.stopped": ("worker", "exit_code"),
    "process.started": ("pid",),
    "process.ended": ("exit_code", "retry_in"),
    "job.claimed": ("jobs",),
    "job.settled": ("settled",),
    "job.released": ("jobs", "reason"),
    "job.rescued": ("jobs",),
    "job.expired": ("jobs",),
    "job.cancel_requested": ("job", "queue", "kind"),
    "job.time_limit": ("job", "queue", "kind", "attempt", "seconds"),
    "job.stuck": ("job", "queue", "kind", "attempt"),
    "job.running_long": ("job", "queue", "kind", "seconds"),
    "session.open_long": ("job", "queue", "kind", "seconds"),
    "job.unknown_kind": ("job", "kind", "queue"),
    "lease.lost": ("job", "queue", "kind", "fencing_token", "reason"),
    "listen.connected": ("channel",),
    "listen.lost": ("error", "retry_in"),
    "listen.unavailable": ("reason",),
    "pooler.detected": ("advice",),
    "database.error": ("operation", "error", "retry_in"),
    "claim.refused": ("job", "queue", "error", "retry_in"),
    "purge.refused": ("jobs", "error"),
    "archive.refused": ("job", "queue", "kind", "error"),
    "result.refused": ("job", "queue", "kind", "error"),
    "delay.refused": ("job", "queue", "kind", "error"),
    "outcome.refused": ("job", "queue", "kind", "error"),
    "loop.crashed": ("loop", "error", "retry_in"),
}

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Event:
    """One fact: its name and its fields."""

    name: str
    fields: dict[str, object]


Listener = Callable[[Event], object]


@dataclass(slots=True, eq=False)
class _Subscription:
    """Its identity tells two subscriptions of one listener apart."""

    listener: Listener


class Events:
    """Who listens to which event.

    >>> seen = []
    >>> events = Events()
    >>> unsubscribe = events.subscribe(seen.append, "lease.lost")
    >>> events.emit("lease.lost", job=7, queue="mail", kind="app.send", fencing_token=2, reason="rescued")
    >>> seen[0].fields["fencing_token"]
    2
    """

    def __init__(self) -> None:
        self._subscriptions: dict[str, tuple[_Subscription, ...]] = {}

    def subscribe(self, listener: Listener, *names: str) -> Callable[[], None]:
        """Call `listener` for each named event (all events without a name); returns how to stop it.

        Raises `ValueError` for a name that no event has.
        """
        if unknown := sorted(set(names) - set(EVENTS)):
            raise ValueError(
                f"no event is called {', '.join(unknown)}; there are {', '.join(sorted(EVENTS))}"
            )
        added = _Subscription(listener)
        # replaced, never changed in place: emit may be reading in another thread
        self._subscriptions = self._subscriptions | {
            name: (*self._subscriptions.get(name, ()), added) for name in names or EVENTS
        }

        def unsubscribe() -> None:
            self._subscriptions = {
                name: tuple(each for each in subscriptions if each is not added)
                for name, subscriptions in self._subscriptions.items()
            }

        return unsubscribe

    def emit(self, name: str, /, **fields: object) -> None:
        """Tell the listeners of `name`. Never raises."""
        subscriptions = self._subscriptions.get(name)
        if not subscriptions:
            return
        event = Event(name, fields)
        for each in subscriptions:
            try:
                each.listener(event)
            except Exception:
                _log.exception("a listener of %s failed", name)
