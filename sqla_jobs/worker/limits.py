"""Time limits of attempts: one wheel for all, turned by the event loop.

An attempt is told once when its limit passes, and reported as stuck when it still runs one more limit
later. Buckets and not a heap: of thousands of attempts a second nearly all end long before their limit,
and must leave nothing behind. Does not end anything itself.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from sqla_jobs.worker.run import Run

__all__ = ["TimeLimits"]

#: A limit is noticed at most so late, when the loop is not blocked.
TICK = 0.05


class TimeLimits:
    """Attempts that have a time limit. `started` and `ended` from any thread, the rest in the loop."""

    def __init__(self, *, passed: Callable[[Run], None], stuck: Callable[[Run], None]) -> None:
        self._passed = passed
        self._stuck = stuck
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._buckets: dict[int, set[Run]] = {}
        self._armed = False

    def started(self, run: Run, seconds: float) -> None:
        """Its time runs from now."""
        with self._lock:
            self._put(run, time.monotonic() + seconds)
            arm, self._armed = not self._armed, True
        if arm:
            with suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(self._turn)

    def ended(self, run: Run) -> None:
        """It needs no watching any more."""
        with self._lock:
            self._take(run)

    def _put(self, run: Run, deadline: float) -> None:
        run.bucket = int(deadline / TICK) + 1
        self._buckets.setdefault(run.bucket, set()).add(run)

    def _take(self, run: Run) -> None:
        bucket, run.bucket = run.bucket, None
        if bucket is None or (runs := self._buckets.get(bucket)) is None:
            return
        runs.discard(run)
        if not runs:
            del self._buckets[bucket]

    def _turn(self) -> None:
        """Tell of every limit that has passed; again in a tick, while there is anything to watch."""
        now = time.monotonic()
        late: list[Run] = []
        with self._lock:
            for bucket in [each for each in self._buckets if each <= now / TICK]:
                late += self._buckets.pop(bucket)
            for run in late:
                run.bucket = None
                if not run.timed_out and run.timeout is not None:
                    self._put(run, now + run.timeout)
            self._armed = bool(self._buckets)
            armed = self._armed
        for run in late:
            if run.ended:
                continue
            if run.timed_out:
                self._stuck(run)
            else:
                run.timed_out = True
                self._passed(run)
        if armed:
            self._loop.call_later(TICK, self._turn)
