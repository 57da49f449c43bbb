"""Claimed jobs wait here for a slot: a buffer, consumer threads, and consumer tasks in the loop.

At most `concurrency` attempts run at once, sync and async together, of these at most `threads` in
threads, started in the order of their claim. Consumers are long-lived: a thread or task per job costs
several times the job (docs/adr/0005).
"""

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from sqla_jobs.worker.run import Ended, Run, Runner

__all__ = ["Slots"]

#: A consumer gives the loop a chance after so many jobs that never waited for anything.
_YIELD_EVERY = 64
#: Seconds until the system is asked for a thread again that it had not.
_NO_THREAD_PAUSE = 0.5


class Slots:
    """Runs what is added. `finished` is told, in the loop, of bursts of runs that ended."""

    def __init__(
        self,
        runner: Runner,
        *,
        concurrency: int,
        threads: int,
        finished: Callable[[list[Ended]], None],
    ) -> None:
        self._runner = runner
        self._concurrency = concurrency
        self._most_threads = threads
        self._finished = finished
        self._loop = asyncio.get_running_loop()
        # one lock for both buffers and the count; `woken` is its condition for threads
        self._lock = threading.Lock()
        self._woken = threading.Condition(self._lock)
        self._for_threads: deque[tuple[int, Run]] = deque()
        self._for_loop: deque[tuple[int, Run]] = deque()
        self._order = 0
        self._running: set[Run] = set()
        self._in_threads = 0
        self._closed = False
        self._deferred = False  # a consumer found older work on the other side
        self._threads: list[threading.Thread] = []
        self._idle_threads = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._idle: deque[asyncio.Future[None]] = deque()
        self._burst: list[Ended] = []
        self._told = False

    @property
    def waiting(self) -> int:
        """Claimed, not started."""
        return len(self._for_threads) + len(self._for_loop)

    @property
    def free_threads(self) -> int:
        """How many more attempts could start in a thread, as far as threads go."""
        return self._most_threads - self._in_threads - len(self._for_threads)

    @property
    def running(self) -> list[Run]:
        """What runs at this moment."""
        with self._lock:
            return list(self._running)

    def add(self, runs: Iterable[Run]) -> None:
        """Start these when there are slots, in this order."""
        with self._lock:
            for run in runs:
                self._order += 1
                side = self._for_loop if run.task.is_async else self._for_threads
                side.append((self._order, run))
            # a consumer that is at work is none that could take these
            threads = min(
                len(self._for_threads) - self._idle_threads, self._most_threads - len(self._threads)
            )
            tasks = min(len(self._for_loop) - len(self._idle), self._concurrency - len(self._tasks))
            self._woken.notify(len(self._for_threads))
        self._start_threads(threads)
        for _ in range(tasks):
            self._tasks.append(self._loop.create_task(self._consume_in_loop()))
        self._wake_tasks(len(self._for_loop))

    def close(self) -> list[Run]:
        """Start nothing any more; returns what had not started."""
        with self._lock:
            self._closed = True
            unstarted = [run for _, run in sorted([*self._for_threads, *self._for_loop], key=_by_order)]
            self._for_threads.clear()
            self._for_loop.clear()
            self._woken.notify_all()
        self._wake_tasks(len(self._idle))
        return unstarted

    async def gone(self) -> None:
        """After `close`, wait for the consumer tasks to end; not for a handler that swallows its end."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)

    # -- taking

    def _take_for_thread(self) -> Run | None:
        """The next for a thread, if there is room and nothing older waits for the loop. Lock held."""
        if not self._for_threads or not self._has_thread():
            return None  # whoever ends a run wakes the next
        return self._take(self._for_threads, older=self._for_loop)

    def _take_for_loop(self) -> Run | None:
        """The next for the loop; what waits for a thread is older only while there is one. Lock held."""
        if not self._for_loop:
            return None
        return self._take(self._for_loop, older=self._for_threads if self._has_thread() else None)

    def _has_thread(self) -> bool:
        return self._in_threads < self._most_threads

    def _take(self, mine: deque[tuple[int, Run]], *, older: deque[tuple[int, Run]] | None) -> Run | None:
        if len(self._running) >= self._concurrency:
            return None
        if older and older[0][0] < mine[0][0]:
            self._deferred = True
            return None
        run = mine.popleft()[1]
        self._running.add(run)
        if mine is self._for_threads:
            self._in_threads += 1
        if self._deferred:
            # somebody went back to sleep because this one was older: it may be their turn now
            self._deferred = False
            self._woken.notify_all()
            self._in_loop(self._wake_all_tasks)
        return run

    def _end(self, ended: Ended) -> None:
        """A run ended, in whichever thread: free its slot, and tell the loop once per burst."""
        with self._lock:
            self._running.discard(ended.run)
            if not ended.run.task.is_async:
                self._in_threads -= 1
            self._burst.append(ended)
            tell, self._told = not self._told, True
            if self._for_threads:
                self._woken.notify()
            wake = bool(self._for_loop) and bool(self._idle)
        if tell:
            self._in_loop(self._tell)
        if wake:
            self._in_loop(lambda: self._wake_tasks(1))

    def _in_loop(self, callback: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # a thread that outlived its worker
            self._loop.call_soon_threadsafe(callback)

    def _tell(self) -> None:
        with self._lock:
            burst, self._burst, self._told = self._burst, [], False
        self._finished(burst)

    # -- threads

    def _start_threads(self, count: int) -> None:
        """As many as can be; what the system refuses now is tried again, for as long as something waits."""
        try:
            for _ in range(count):
                self._start_thread()
        except RuntimeError:
            self._loop.call_later(_NO_THREAD_PAUSE, self._start_missing)

    def _start_missing(self) -> None:
        with self._lock:
            missing = min(
                len(self._for_threads) - self._idle_threads, self._most_threads - len(self._threads)
            )
        self._start_threads(missing)

    def _start_thread(self) -> None:
        thread = threading.Thread(
            target=self._consume_in_thread, name=f"sqla_jobs handler {len(self._threads)}", daemon=True
        )
        thread.start()
        self._threads.append(thread)

    def _consume_in_thread(self) -> None:
        while True:
            with self._lock:
                while (run := self._take_for_thread()) is None:
                    if self._closed:
                        return
                    self._idle_threads += 1
                    self._woken.wait()
                    self._idle_threads -= 1
            try:
                ended = contextvars.Context().run(self._runner.in_thread, run)
            except BaseException as error:  # a consumer that dies is a slot that is gone
                ended = self._runner.broken(run, error)
            self._end(ended)
            del run, ended

    # -- tasks in the loop

    def _wake_all_tasks(self) -> None:
        self._wake_tasks(len(self._idle))

    def _wake_tasks(self, count: int) -> None:
        for _ in range(min(count, len(self._idle))):
            future = self._idle.popleft()
            if not future.done():
                future.set_result(None)

    async def _consume_in_loop(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        count = 0
        while True:
            with self._lock:
                run = self._take_for_loop()
            if run is None:
                if self._closed:
                    return
                future: asyncio.Future[None] = self._loop.create_future()
                self._idle.append(future)
                await future
                continue
            task.set_name(f"{run.job.kind} {run.job.lease.id}")
            try:
                ended = await self._runner.in_loop(run)
            except GeneratorExit:
                raise  # the loop is gone
            except BaseException as error:  # as above
                ended = self._runner.broken(run, error)
            self._end(ended)
            del run, ended
            count += 1
            if count % _YIELD_EVERY == 0:
                await asyncio.sleep(0)


def _by_order(item: tuple[int, Run]) -> int:
    return item[0]
