"""Several processes under one, signals in three steps, and what a start only checks."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import shop
from processes import TESTS, WorkerProcess, worker_process
from sqlalchemy import Engine
from sqlalchemy.orm import Session
from workers import rows, until, until_row

from sqla_jobs.tasks import Jobs, Task, enqueue

pytestmark = pytest.mark.system

QUICK = ("--lease", "4s", "-q", "files", "--poll-interval", "300ms")


def put(engine: Engine, task: Task[Any], *args: Any, **kwargs: Any) -> int:
    """Enqueue and commit; the job's id."""
    with Session(engine) as session, session.begin():
        handle = enqueue(session, task, *args, **kwargs)
    return handle.id


def children(pid: int) -> set[int]:
    """The living child processes of `pid`."""
    found = subprocess.run(["ps", "-o", "pid=,stat=", "--ppid", str(pid)], capture_output=True, text=True)
    return {int(line.split()[0]) for line in found.stdout.splitlines() if "Z" not in line.split()[1]}


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def started(worker: WorkerProcess, count: int) -> set[int]:
    """Wait until so many children work."""
    await until(lambda: worker.text().count("worker.started") >= count)
    return children(worker.pid)


async def test_processes_share_the_work_and_end_together(
    engine: Engine, database_url: str, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    for number in range(40):
        put(engine, shop.append_line, str(trace), str(number))

    with worker_process(database_url, tmp_path / "log", "--processes", "2", *QUICK) as worker:
        pids = await started(worker, 2)
        await until_row(engine, "SELECT 1 FROM background_jobs_archive HAVING count(*) = 40")
        code = worker.stop()

    assert code == 0
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)
    assert worker.text().count("worker.stopped") == 2


async def test_a_child_that_is_killed_gets_a_successor(
    engine: Engine, database_url: str, tmp_path: Path
) -> None:
    with worker_process(database_url, tmp_path / "log", "--processes", "2", *QUICK) as worker:
        pids = await started(worker, 2)
        victim = min(pids)
        os.kill(victim, signal.SIGKILL)
        await started(worker, 3)
        code = worker.stop()

    assert code == 0
    assert "process.ended exit_code=-9" in worker.text()


async def test_a_child_that_recycles_gets_a_successor(
    engine: Engine, database_url: str, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    for number in range(3):
        put(engine, shop.append_line, str(trace), str(number))

    options = ("--processes", "2", "--max-jobs", "1", *QUICK)
    with worker_process(database_url, tmp_path / "log", *options) as worker:
        await until_row(engine, "SELECT 1 FROM background_jobs_archive HAVING count(*) = 3")
        code = worker.stop()

    assert code == 0
    assert "process.ended exit_code=7" in worker.text()


async def test_when_the_supervisor_is_killed_its_children_drain(
    engine: Engine, database_url: str, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    with worker_process(database_url, tmp_path / "log", "--processes", "2", *QUICK) as worker:
        pids = await started(worker, 2)
        put(engine, shop.hold, str(trace), "one", 1.0)
        await until_row(engine, "SELECT 1 FROM background_jobs WHERE status = 'running'")
        worker.kill()
        await until(lambda: not any(alive(pid) for pid in pids))

    assert worker.text().count("worker.stopped") == 2
    assert rows(engine, "SELECT status FROM background_jobs_archive") == [("done",)]


async def test_drain_with_processes_ends_by_itself(engine: Engine, database_url: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    for number in range(10):
        put(engine, shop.append_line, str(trace), str(number))

    options = ("--processes", "2", "--mode", "drain", *QUICK)
    with worker_process(database_url, tmp_path / "log", *options) as worker:
        assert worker.wait() == 0

    assert rows(engine, "SELECT count(*) FROM background_jobs_archive") == [(10,)]


def test_children_that_cannot_start_end_the_supervisor_with_their_code(
    empty_database_url: str, tmp_path: Path
) -> None:
    with worker_process(empty_database_url, tmp_path / "log", "--processes", "2") as worker:
        assert worker.wait() == 4

    assert "there is no table" in worker.text()


async def test_the_second_signal_reaches_the_children(
    engine: Engine, database_url: str, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    with worker_process(database_url, tmp_path / "log", "--processes", "2", *QUICK) as worker:
        await started(worker, 2)
        put(engine, shop.hold, str(trace), "one", 60.0)
        await until(lambda: trace.exists() and "start one" in trace.read_text())
        worker.process.send_signal(signal.SIGTERM)
        await until(lambda: "worker.draining" in worker.text())
        worker.process.send_signal(signal.SIGTERM)
        code = worker.wait()

    assert code == 1
    assert rows(engine, "SELECT status, attempts FROM background_jobs") == [("ready", 0)]


@pytest.mark.parametrize("how", ["third", "quit"])
async def test_the_third_signal_or_sigquit_ends_at_once_and_leaves_the_job_to_its_lease(
    engine: Engine, database_url: str, tmp_path: Path, how: str
) -> None:
    trace = tmp_path / "trace"
    put(engine, shop.hold, str(trace), "one", 60.0)

    with worker_process(database_url, tmp_path / "log", *QUICK) as worker:
        await until(lambda: trace.exists() and "start one" in trace.read_text())
        # stopped, so that all three are there when it goes on: the third must not wait for the second
        worker.process.send_signal(signal.SIGSTOP)
        if how == "quit":
            worker.process.send_signal(signal.SIGQUIT)
        else:
            worker.process.send_signal(signal.SIGTERM)
            worker.process.send_signal(signal.SIGCONT)
            await until(lambda: "worker.draining" in worker.text())
            with engine.connect() as connection:
                # its settle lane waits for the row, so that the second signal cannot end it
                connection.exec_driver_sql("LOCK TABLE background_jobs IN ACCESS EXCLUSIVE MODE")
                worker.process.send_signal(signal.SIGTERM)
                await until(lambda: "job.released" in worker.text())
                worker.process.send_signal(signal.SIGTERM)
                assert worker.wait() == 1
                # its backends do not know yet that it is gone, and would still do what they wait for
                connection.exec_driver_sql(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND wait_event_type = 'Lock'"
                )
        worker.process.send_signal(signal.SIGCONT)
        code = worker.wait()

    assert code == 1
    assert "worker.stopped" not in worker.text()
    row = await until_row(engine, "SELECT status, attempts FROM background_jobs")
    assert row == ("running", 1)


async def test_sigusr1_makes_a_worker_quiet_and_sigusr2_shows_its_stacks(
    engine: Engine, database_url: str, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    with worker_process(database_url, tmp_path / "log", *QUICK) as worker:
        await until(lambda: "worker.started" in worker.text())
        worker.process.send_signal(signal.SIGUSR1)
        await until(lambda: "worker.quiet" in worker.text())
        put(engine, shop.append_line, str(trace), "one")
        worker.process.send_signal(signal.SIGUSR2)
        await until(lambda: "Current thread" in worker.text())
        code = worker.stop()

    assert code == 0
    assert rows(engine, "SELECT status FROM background_jobs") == [("ready",)]


def test_check_says_whether_a_worker_could_start(
    database_url: str, empty_database_url: str, tmp_path: Path
) -> None:
    def check(url: str, *options: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "sqla_jobs.worker", "--check", "--app", "shop:jobs", *options],
            cwd=TESTS,
            env=os.environ | {"DATABASE_URL": url},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout

    code, said = check(database_url, "--processes", "3")

    assert code == 0
    assert re.match("a worker could start: queues default, files, .*mail.*; kinds shop.append_line, ", said)
    assert check(empty_database_url) == (4, "")
    assert check("postgresql://127.0.0.1:1/nowhere", "--startup-timeout", "1s") == (5, "")


async def test_sigquit_ends_the_supervisor_and_its_children_at_once(
    engine: Engine, database_url: str, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    with worker_process(database_url, tmp_path / "log", "--processes", "2", *QUICK) as worker:
        pids = await started(worker, 2)
        put(engine, shop.hold, str(trace), "one", 30.0)
        await until_row(engine, "SELECT 1 FROM background_jobs WHERE status = 'running'")
        worker.process.send_signal(signal.SIGQUIT)
        code = worker.wait()

    assert code == 1
    assert not any(alive(pid) for pid in pids)
    assert worker.text().count("process.started") == 2


async def test_the_successor_of_a_quiet_child_is_quiet(
    engine: Engine, database_url: str, tmp_path: Path
) -> None:
    with worker_process(database_url, tmp_path / "log", "--processes", "2", *QUICK) as worker:
        pids = await started(worker, 2)
        await until(lambda: worker.text().count("listen.connected") >= 2)
        worker.process.send_signal(signal.SIGUSR1)
        await until(lambda: worker.text().count("worker.quiet") == 2)
        os.kill(min(pids), signal.SIGKILL)
        await started(worker, 3)
        await until(lambda: worker.text().count("listen.connected") >= 3)
        put(engine, shop.append_line, str(tmp_path / "trace"), "no")
        await asyncio.sleep(1.0)  # nothing is to happen: several polls, and the wake-up
        code = worker.stop()

    assert code == 0
    assert rows(engine, "SELECT status, fencing_token FROM background_jobs") == [("ready", 0)]


async def test_a_process_ends_although_a_handlers_own_thread_does_not(
    engine: Engine, database_url: str, tmp_path: Path
) -> None:
    """A coroutine past its limit leaves what it gave to to_thread behind; Python would wait for that."""
    (tmp_path / "threads.py").write_text(
        "import asyncio, time\n"
        "from datetime import timedelta\n"
        "from shop import Job\n"
        "from sqla_jobs import Jobs, Retry\n"
        "jobs = Jobs(Job)\n"
        "retry = Retry(delay=timedelta(hours=1))\n"
        "@jobs.task(name='job', queue='files', timeout=timedelta(seconds=0.2), retry=retry)\n"
        "async def job() -> None:\n"
        "    await asyncio.to_thread(time.sleep, 60)\n",
        encoding="utf-8",
    )
    jobs = Jobs(shop.Job)
    remote = jobs.remote("job", queue="files")
    with Session(engine) as session, session.begin():
        enqueue(session, remote)

    options = ("--drain-timeout", "2s", *QUICK)
    with worker_process(
        database_url, tmp_path / "log", *options, app="threads:jobs", folder=tmp_path
    ) as worker:
        await until_row(engine, "SELECT 1 FROM background_jobs WHERE last_error IS NOT NULL")
        began = time.monotonic()
        code = worker.stop()
        took = time.monotonic() - began

    assert code == 0
    assert took < 5
