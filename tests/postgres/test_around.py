"""Middlewares around attempts, and what becomes of results."""

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from shop import Job, Order
from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session
from workers import rows, working

from sqla_jobs.context import AsyncJobContext, JobContext
from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.core.retry import Retry
from sqla_jobs.errors import ConfigurationError
from sqla_jobs.tasks import Jobs, Task, enqueue

ONCE = Retry(max_attempts=1)


@pytest.fixture
def jobs() -> Jobs:
    """Tasks of this test's own, on the shop's tables."""
    return Jobs(Job)


def put(engine: Engine, task: Task[Any], *args: Any) -> int:
    """Enqueue and commit; the job's id."""
    with Session(engine) as session, session.begin():
        handle = enqueue(session, task, *args)
    return handle.id


# -- around


async def test_middlewares_surround_the_handler_in_its_own_thread_or_task(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="nobody")
    seen: list[tuple[str, str, int, str]] = []

    @jobs.around
    @contextmanager
    def outer(ctx: JobContext[Any]) -> Iterator[None]:
        seen.append(("enter outer", ctx.kind, threading.get_ident(), tenant.get()))
        token = tenant.set(f"tenant {ctx.id}")
        yield
        tenant.reset(token)  # a ValueError in any other context
        seen.append(("leave outer", ctx.kind, threading.get_ident(), tenant.get()))

    @jobs.around
    @contextmanager
    def inner(ctx: JobContext[Any]) -> Iterator[None]:
        seen.append(("enter inner", ctx.kind, threading.get_ident(), tenant.get()))
        yield
        seen.append(("leave inner", ctx.kind, threading.get_ident(), tenant.get()))

    @jobs.task(name="thread")
    def in_thread() -> None:
        seen.append(("run", "thread", threading.get_ident(), tenant.get()))

    @jobs.task(name="loop")
    async def in_loop() -> None:
        await asyncio.sleep(0)
        seen.append(("run", "loop", threading.get_ident(), tenant.get()))

    for task in (in_thread, in_loop):
        job = put(engine, task)
        seen.clear()

        async with working(jobs, database_url, concurrency=1) as (_, heard):
            assert await heard.settled(1) == [JobStatus.DONE]

        assert [what for what, *_ in seen] == [
            "enter outer", "enter inner", "run", "leave inner", "leave outer",
        ]  # fmt: skip
        assert {kind for _, kind, *_ in seen} == {task.kind}
        assert len({thread for *_, thread, _ in seen}) == 1
        assert [value for *_, value in seen] == ["nobody", *[f"tenant {job}"] * 3, "nobody"]
    assert tenant.get() == "nobody"


async def test_a_middleware_sees_what_the_handler_raises(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    caught: list[BaseException] = []

    @jobs.around
    @contextmanager
    def reporting(ctx: JobContext[Any]) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            caught.append(error)
            raise

    @jobs.task(name="broken", retry=ONCE)
    def broken() -> None:
        raise ValueError("as seen from outside")

    put(engine, broken)

    async with working(jobs, database_url) as (_, heard):
        assert await heard.settled(1) == [JobStatus.FAILED]

    assert [str(error) for error in caught] == ["as seen from outside"]


@pytest.mark.parametrize("where", ["factory", "enter", "exit"])
@pytest.mark.parametrize("form", ["thread", "loop"])
async def test_a_middleware_that_fails_fails_the_attempt_and_nothing_else(
    engine: Engine, database_url: str, jobs: Jobs, where: str, form: str
) -> None:
    class Broken:
        def __enter__(self) -> None:
            if where == "enter":
                raise RuntimeError("no enter")

        def __exit__(self, *_: object) -> None:
            if where == "exit":
                raise RuntimeError("no exit")

    @jobs.around
    def broken(ctx: JobContext[Any]) -> Any:
        if where == "factory":
            raise RuntimeError("no factory")
        return Broken() if ctx.kind == "unlucky" else nullcontext()

    def write(ctx: JobContext) -> None:
        ctx.session.add(Order(customer="never"))

    async def write_async(ctx: AsyncJobContext) -> None:
        ctx.session.add(Order(customer="never"))

    made: Callable[[Any], Task[Any]] = jobs.task(name="unlucky", retry=ONCE)
    put(engine, made(write if form == "thread" else write_async))

    async with working(jobs, database_url) as (_, heard):
        assert await heard.settled(1) == [JobStatus.FAILED]

    [(error,)] = rows(engine, "SELECT last_error FROM background_jobs")
    assert error.startswith(f"RuntimeError: no {where}")
    assert rows(engine, "SELECT count(*) FROM orders") == [(0,)]


async def test_a_middleware_may_use_the_attempts_session(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    @jobs.around
    @contextmanager
    def bookkeeping(ctx: JobContext[Any]) -> Iterator[None]:
        yield
        ctx.session.add(Order(customer=f"by {ctx.kind}"))

    @jobs.task(name="plain")
    def plain() -> None: ...

    @jobs.task(name="coroutine")
    async def coroutine() -> None: ...

    put(engine, plain)
    put(engine, coroutine)

    async with working(jobs, database_url) as (_, heard):
        assert await heard.settled(2) == [JobStatus.DONE] * 2

    with Session(engine) as session:
        assert session.scalar(select(func.count()).select_from(Order)) == 2


async def test_an_async_context_manager_fails_its_attempt_with_the_reason(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    @asynccontextmanager
    async def wrong(ctx: JobContext[Any]) -> AsyncIterator[None]:
        yield

    jobs.around(lambda ctx: wrong(ctx))  # type: ignore[arg-type, return-value]

    @jobs.task(name="job", retry=ONCE)
    async def job() -> None: ...

    put(engine, job)

    async with working(jobs, database_url) as (_, heard):
        assert await heard.settled(1) == [JobStatus.FAILED]

    [(error,)] = rows(engine, "SELECT last_error FROM background_jobs")
    assert "must return a plain context manager, got _AsyncGeneratorContextManager" in error


def test_an_async_middleware_is_refused_when_it_is_registered(jobs: Jobs) -> None:
    @asynccontextmanager
    async def managed(ctx: JobContext[Any]) -> AsyncIterator[None]:
        yield

    async def coroutine(ctx: JobContext[Any]) -> None: ...

    for wrong in (managed, coroutine, None, "name"):
        with pytest.raises(ConfigurationError, match="plain context manager"):
            jobs.around(wrong)  # type: ignore[arg-type]


# -- results


@dataclass
class Invoice:
    number: int
    total: Decimal
    due: datetime


DUE = datetime(2026, 3, 1, 12, tzinfo=UTC)


async def test_a_result_is_stored_by_the_return_annotation_if_the_task_says_so(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    @jobs.task(name="bill", store_result=True)
    def bill() -> Invoice:
        return Invoice(7, Decimal("1.10"), DUE)

    @jobs.task(name="count", store_result=True)
    async def count():  # type: ignore[no-untyped-def]
        return {"rows": [1, 2, None]}

    @jobs.task(name="silent")
    def silent() -> int:
        return 5

    ids = [put(engine, task) for task in (bill, count, silent)]

    async with working(jobs, database_url) as (_, heard):
        assert await heard.settled(3) == [JobStatus.DONE] * 3

    with Session(engine) as session:
        results = [record.result for id_ in ids if (record := jobs.find(session, id_))]
    assert results == [
        {"number": 7, "total": "1.10", "due": "2026-03-01T12:00:00+00:00"},
        {"rows": [1, 2, None]},
        None,
    ]


def generator() -> Iterator[int]:
    yield 1


async def coroutine() -> None: ...


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({1, 2}, "set"),
        (object(), "object"),
        ("x" * 300_000, "the limit is 262,144"),
        (float("nan"), "nan"),
        (b"bytes", "bytes"),
        ("a\x00b", "U+0000"),
        (timedelta(1), "timedelta"),
        ([[float("inf")]], "inf"),
    ],
    ids=["set", "object", "large", "nan", "bytes", "nul", "timedelta", "nested"],
)
async def test_b16_a_result_that_cannot_be_stored_is_left_out_and_the_job_is_done_once(
    engine: Engine, database_url: str, jobs: Jobs, value: object, said: str
) -> None:
    runs: list[int] = []

    @jobs.task(name="job", store_result=True)
    def job(ctx: JobContext) -> Any:
        runs.append(ctx.attempt)
        return value

    put(engine, job)

    async with working(jobs, database_url) as (_, heard):
        assert await heard.settled(1) == [JobStatus.DONE]

    assert runs == [1]
    assert rows(engine, "SELECT status, result FROM background_jobs_archive") == [("done", None)]
    [event] = heard.named("result.refused")
    assert said in str(event.fields["error"])


@pytest.mark.parametrize("store", [True, False])
async def test_b16_a_coroutine_returned_by_a_coroutine_is_closed_and_the_job_done(
    engine: Engine, database_url: str, jobs: Jobs, store: bool
) -> None:
    @jobs.task(name="job", store_result=store)
    async def job() -> Any:
        return coroutine()

    put(engine, job)

    async with working(jobs, database_url) as (_, heard):
        assert await heard.settled(1) == [JobStatus.DONE]


async def test_b16_what_nobody_runs_fails_its_job_at_once_and_for_good(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    @jobs.task(name="job", retry=Retry(max_attempts=5))
    def job() -> Any:
        return generator()

    put(engine, job)

    async with working(jobs, database_url) as (_, heard):
        assert await heard.settled(1) == [JobStatus.FAILED]

    [(attempts, error)] = rows(engine, "SELECT attempts, last_error FROM background_jobs")
    assert attempts == 1
    assert error.startswith("TypeError: the handler returned a generator, which nobody runs")
