"""Faults that people met with other queues, in processes: frozen, killed, stopped, mistimed.

Each is named by its case; tests/README.md lists them.
"""

import importlib.metadata
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import shop
from ledger import Ledger
from processes import TESTS, worker_process
from sqlalchemy import Engine
from sqlalchemy.orm import Session
from steps import KEEP, TABLES, autocommit, candidates, everything, judged, take, written
from workers import execute, rows, until, until_row

from sqla_jobs.core.lifecycle import Aborted, Raised, Returned, Verdict
from sqla_jobs.store.settle import settle_expired
from sqla_jobs.tasks import Task, enqueue

pytestmark = pytest.mark.system

QUICK = ("--lease", "2s", "-q", "files", "--poll-interval", "300ms")
full = pytest.mark.full


def put(engine: Engine, task: Task[Any], *args: Any, **kwargs: Any) -> int:
    """Enqueue and commit; the job's id."""
    with Session(engine) as session, session.begin():
        handle = enqueue(session, task, *args, **kwargs)
    return handle.id


def lines(trace: Path) -> list[list[str]]:
    """What handlers have written: start or end, name, pid, attempt."""
    return [line.split() for line in trace.read_text().splitlines()] if trace.exists() else []


def starts(trace: Path) -> list[str]:
    return [name for what, name, *_ in lines(trace) if what == "start"]


async def test_b23_a_frozen_worker_that_comes_back_changes_nothing_whatever_became_of_its_jobs(
    engine: Engine, database_url: str, tmp_path: Path
) -> None:
    """Four states of the second attempt, and in each the first returns (through its session) or fails."""
    ledger = Ledger(engine, tmp_path / "trace")
    ends: list[Verdict | None] = [
        None,
        judged(Returned()),
        judged(Raised("the second attempt's", timedelta(hours=1))),
        judged(Aborted("the second attempt's")),
    ]
    trace = str(ledger.trace)
    for number in range(4):
        put(engine, shop.enter, trace, 2.5)
        put(engine, shop.hold_and_fail, trace, f"fails{number}", 2.5)

    with (
        worker_process(database_url, tmp_path / "log", "--lease", "2s", "-q", "files", "-c", "8") as first,
        autocommit(engine) as b,
    ):
        await until(lambda: len(starts(ledger.trace)) == 8)
        first.freeze()
        execute(engine, "UPDATE background_jobs SET locked_until = clock_timestamp() - interval '1 s'")
        assert len(settle_expired(b, TABLES, candidates(b, queue="files"), retention=KEEP).written) == 8
        for number, lease in enumerate(take(b, "B", limit=8, queue="files")):
            if (end := ends[number // 2]) is not None:
                assert written(b, (lease, end)).written
        before = everything(b)

        first.thaw()
        await until(lambda: first.text().count("lease.lost") == 8)
        code = first.stop()

        assert everything(b) == before
    assert code == 0
    assert rows(engine, "SELECT * FROM ledger") == []
    assert first.text().count("lease.lost") == 8
    assert "job.failed" not in first.text()


@full
async def test_b25_a_job_that_kills_its_process_starts_three_times_and_no_more(
    engine: Engine, database_url: str, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    killer = put(engine, shop.kill_worker, str(trace))
    for number in range(6):
        put(engine, shop.append_line, str(trace), f"job{number}")

    with worker_process(database_url, tmp_path / "log", "--processes", "2", "-c", "2", *QUICK) as workers:
        failed = await until_row(
            engine,
            "SELECT id, attempts, last_error FROM background_jobs WHERE status = 'failed'",
            patience=60,
        )
        await until_row(engine, "SELECT 1 FROM background_jobs_archive HAVING count(*) = 6", patience=30)
        code = workers.stop()

    assert code == 0
    assert failed[:2] == (killer, 3)
    assert failed[2].startswith("lease lost by worker")
    assert starts(trace).count("killer") == 3
    # its neighbours may be charged for what it does to them, and come to their end all the same
    assert rows(engine, "SELECT DISTINCT status FROM background_jobs_archive") == [("done",)]
    assert rows(engine, "SELECT count(*) FROM background_jobs WHERE status = 'running'") == [(0,)]


@pytest.mark.parametrize("moments", [2, pytest.param(20, marks=full)])
async def test_b27_a_stop_at_any_moment_of_the_start_is_not_lost(
    engine: Engine, database_url: str, tmp_path: Path, moments: int
) -> None:
    trace = tmp_path / "trace"
    for number in range(4):
        put(engine, shop.hold, str(trace), f"job{number}", 0.3)

    for moment in range(moments):
        with worker_process(database_url, tmp_path / f"log{moment}", "-c", "1", *QUICK) as worker:
            late = 0.05 if moment == 0 else random.random()
            with pytest.raises(subprocess.TimeoutExpired):
                worker.process.wait(late)
            assert worker.stop() in (0, -signal.SIGTERM)  # before Python itself is up, nobody hears it

    left = set(rows(engine, "SELECT status, attempts, locked_by FROM background_jobs"))
    assert left <= {("ready", 0, None)}
    # whatever was started was finished
    assert Counter(starts(trace)) == Counter(name for what, name, *_ in lines(trace) if what == "end")


async def test_b27_sigint_and_then_sigterm_start_nothing_more_and_give_everything_back(
    engine: Engine, database_url: str, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    for number in range(20):
        put(engine, shop.hold, str(trace), f"job{number}", 0.7)

    with worker_process(database_url, tmp_path / "log", "-c", "2", *QUICK) as worker:
        await until(lambda: len(starts(trace)) == 2)
        worker.process.send_signal(signal.SIGINT)
        await until(lambda: "worker.draining" in worker.text())
        begun = len(starts(trace))
        code = worker.stop()

    assert code == 1
    assert len(starts(trace)) == begun
    ready = "SELECT count(*) FILTER (WHERE status = 'ready' AND attempts = 0), count(*) FROM background_jobs"
    [(waiting, left)] = rows(engine, ready)
    assert 18 <= waiting == left


@full
async def test_b54_workers_whose_clock_is_wrong_or_steps_back_run_every_job_once_and_in_its_time(
    engine: Engine, database_url: str, tmp_path: Path
) -> None:
    """Ten minutes ahead, ten behind, and one that steps back an hour while it works."""
    trace = tmp_path / "trace"
    held = [put(engine, shop.hold, str(trace), f"job{number}", 2.6) for number in range(6)]
    late = put(engine, shop.append_line.using(delay=timedelta(seconds=1.5)), str(trace), "late")
    wrong = {"ahead": "600", "behind": "-600", "steps": "-3600 * (monotonic() > began + 1)"}
    running = []
    for name, shift in wrong.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(
            "import time\nfrom time import monotonic, time as real\nbegan = float('inf')\n"
            f"time.time = lambda: real() + ({shift})\n",
            encoding="utf-8",
        )
        (folder / "mistimed.py").write_text(
            f"import sys, time\nsys.path.insert(0, {str(TESTS)!r})\nfrom shop import jobs\n"
            "import sitecustomize\nsitecustomize.began = time.monotonic()\n"
            "print('off by', round(time.time() - time.clock_gettime(time.CLOCK_REALTIME)), flush=True)\n",
            encoding="utf-8",
        )
        options: Any = {"app": "mistimed:jobs", "folder": folder}
        running.append(worker_process(database_url, folder / "log", "-c", "3", *QUICK, **options))

    with running[0] as ahead, running[1] as behind, running[2] as steps:
        await until_row(engine, "SELECT 1 FROM background_jobs_archive HAVING count(*) = 7")
        codes = [worker.stop() for worker in (ahead, behind, steps)]

    assert codes == [0, 0, 0]
    said = [re.findall(r"off by (-?\d+)", worker.text()) for worker in (ahead, behind, steps)]
    assert said == [["600"], ["-600"], ["0"]]
    assert len(starts(trace)) == 7
    archived = rows(
        engine, "SELECT id, attempts, started_at - run_at FROM background_jobs_archive ORDER BY id"
    )
    assert [row[:2] for row in archived] == [(job, 1) for job in (*held, late)]
    # a start takes its time; a wrong clock would have been too early, or minutes late
    assert timedelta(0) <= archived[-1][2] < timedelta(seconds=20)


def test_b57_what_a_plain_install_brings_is_enough_for_everything_but_the_extras() -> None:
    """The wheel itself is installed elsewhere and run by the gate (.ci/run wheel)."""
    required = [each for each in importlib.metadata.requires("sqla_jobs") or [] if "extra" not in each]
    others = (
        "asyncpg flask flask_sqlalchemy fastapi starlette httpx msgspec pydantic rich sqlmodel uvicorn "
        "pytest hypothesis"
    )
    code = (
        "import sys\n"
        f"for name in {others.split()!r}: sys.modules[name] = None\n"
        "import sqla_jobs, sqla_jobs.worker, sqla_jobs.migrations, sqla_jobs.cli\n"
        "import sqla_jobs.worker.program\n"
        "for name in sqla_jobs.__all__: getattr(sqla_jobs, name)\n"
        "from sqlalchemy.ext.asyncio import create_async_engine\n"
        "create_async_engine('postgresql+psycopg://nowhere')\n"
    )

    plain = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )

    assert (plain.returncode, plain.stderr) == (0, "")
    names = {re.split(r"[<>=~!; ]", each)[0] for each in required}
    assert names == {"sqlalchemy[asyncio]", "psycopg", "alembic", "anyio", "typing-extensions"}
