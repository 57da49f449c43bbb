"""Workers inside the test's own process, and ways to wait for what they do: events and rows, never time."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import anyio
from sqlalchemy import Connection, Engine, text

from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.events import Event
from sqla_jobs.tasks import Jobs
from sqla_jobs.worker import Worker

PATIENCE = 20.0  # seconds: a deadline, not a wait


class Heard:
    """Every event of a worker, and a way to wait for one."""

    def __init__(self, worker: Worker) -> None:
        self.events: list[Event] = []
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        worker.events.subscribe(self._hear)

    def _hear(self, event: Event) -> None:
        self.events.append(event)
        self._loop.call_soon_threadsafe(self._news.set)

    def named(self, name: str) -> list[Event]:
        """Those heard so far under this name."""
        return [event for event in self.events if event.name == name]

    def statuses(self) -> list[JobStatus]:
        """The status of every verdict written so far, in order."""
        settled: list[Any] = [each for event in self.named("job.settled") for each in event.fields["settled"]]  # type: ignore[attr-defined]
        return [verdict.status for _, verdict in settled]

    async def until(self, condition: Callable[["Heard"], bool]) -> None:
        """Wait until what was heard satisfies `condition`."""
        with anyio.fail_after(PATIENCE):
            while not condition(self):
                self._news.clear()
                if condition(self):
                    return
                await self._news.wait()

    async def event(self, name: str) -> Event:
        """Wait for the first event of this name."""
        await self.until(lambda heard: bool(heard.named(name)))
        return self.named(name)[0]

    async def settled(self, count: int) -> list[JobStatus]:
        """Wait until so many verdicts are written."""
        await self.until(lambda heard: len(heard.statuses()) >= count)
        return self.statuses()


@asynccontextmanager
async def working(jobs: Jobs, url: str, **options: Any) -> AsyncIterator[tuple[Worker, Heard]]:
    """A worker that runs while the block does, and ends cleanly after it."""
    settings: dict[str, Any] = {"lease": timedelta(seconds=10), "drain_timeout": timedelta(seconds=10)}
    if "engine" not in options and "async_engine" not in options:
        settings["url"] = url
    worker = Worker(jobs, **settings | options)
    heard = Heard(worker)
    task = asyncio.create_task(worker.run())
    try:
        yield worker, heard
    finally:
        worker.stop()
        with anyio.fail_after(PATIENCE):
            await asyncio.wait({task})
        if not task.cancelled() and task.exception() is not None:
            raise task.exception()  # type: ignore[misc]


async def finished(worker: Worker) -> int:
    """Run a worker that ends by itself; its exit code."""
    with anyio.fail_after(PATIENCE):
        return await worker.run()


def rows(engine: Engine | Connection, sql: str, **parameters: Any) -> list[tuple[Any, ...]]:
    """What a statement returns."""
    if isinstance(engine, Connection):
        return [tuple(row) for row in engine.execute(text(sql), parameters)]
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text(sql), parameters)]


def execute(engine: Engine, sql: str, **parameters: Any) -> None:
    """Run a statement and commit."""
    with engine.begin() as connection:
        connection.execute(text(sql), parameters)


async def until_row(
    engine: Engine, sql: str, *, patience: float = PATIENCE, **parameters: Any
) -> tuple[Any, ...]:
    """Wait until a query returns a row."""
    with anyio.fail_after(patience):
        while True:
            found = await asyncio.to_thread(rows, engine, sql, **parameters)
            if found:
                return found[0]
            await _moment()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something outside the loop has happened."""
    with anyio.fail_after(PATIENCE):
        while not condition():
            await _moment()


async def _moment() -> None:
    # between two looks at a foreign fact; the deadline around it bounds the wait
    with anyio.move_on_after(0.02):
        await anyio.Event().wait()
