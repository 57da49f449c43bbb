"""`sqla-jobs demo`: it ends well, goes red when a promise is broken, and leaves nothing behind."""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import NamedTuple

import anyio
import pytest
from sqlalchemy import Engine, create_engine, delete, func, insert, make_url, select, update
from sqlalchemy.orm import Session

from sqla_jobs import Worker
from sqla_jobs.cli import demo
from sqla_jobs.cli.demo import story
from sqla_jobs.cli.demo.checks import Check, Loss, check_all, check_exits
from sqla_jobs.cli.demo.orders import DECLINED_EVERY, Ledger, take_order
from sqla_jobs.cli.demo.screen import PlainScreen, RichScreen, Screen
from sqla_jobs.cli.demo.shop import Base, Order, Receipt, jobs
from sqla_jobs.cli.demo.workers import Staff, WorkerEnded
from sqla_jobs.embedded import EmbeddedPostgres

pytestmark = pytest.mark.system

ORDERS = 20
KILLED = "mail-1:4711:0123456789ab"
KILL_TIME = datetime(2026, 1, 1, tzinfo=UTC)
COMMAND = [sys.executable, "-m", "sqla_jobs", "demo"]
live, archive = jobs.tables.jobs, jobs.tables.archive
_numbers = count(1)


# -- the whole of it


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A TMPDIR of the demo's own, short enough for a socket, so that what is left behind can be seen."""
    tmp_path_factory.getbasetemp()  # made before TMPDIR is another
    directory = Path(f"/tmp/demo-{os.getpid()}-{next(_numbers)}")
    directory.mkdir(mode=0o755)
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setattr(tempfile, "tempdir", None)  # what it remembers of the environment
    yield directory
    shutil.rmtree(directory)


def test_the_demo_shows_every_promise_kept_and_leaves_nothing_behind(place: Path) -> None:
    elsewhere = {"DATABASE_URL": "postgresql://nowhere/x", "SQLA_JOBS_DATABASE_URL": "postgresql://nowhere/x"}
    environment = os.environ | elsewhere | {"PGSERVICE": "none", "SQLA_JOBS_QUEUE": "other"}

    run = subprocess.run([*COMMAND, "--orders", "120"], capture_output=True, text=True, env=environment)

    assert (run.returncode, run.stderr) == (0, ""), run.stdout + run.stderr
    lines = [line.split() for line in run.stdout.splitlines() if re.match(r"  (ok|FAILED) ", line)]
    assert len(lines) == 10
    assert {line[0] for line in lines} == {"ok"}
    for row in (
        r"committed orders +108 +108",
        r"rolled-back orders +12 +12",
        r"receipts in the table, one per order +108 +108",
        r"receipt files, one per order, right text +108 +108",
        r"traces of rolled-back orders +0 +0",
        r"jobs unsettled or failed +0 +0",
        r"done jobs in the archive, one per order +108 +108",
        r"jobs of the killed worker, rescued and done +([1-9]\d*) +\1  the last one \d+\.\d s after the kill",
        r"exit code of mail-[12] \(killed\) +-9 +-9",
        r"exit codes of mail-[12], mail-3 \(SIGTERM\) +0 0 +0 0",
    ):
        assert re.search(rf"^  ok      {row}", run.stdout, re.MULTILINE), row
    assert re.search(r"kill -9 of mail-[12] \(pid \d+\)", run.stdout)
    assert "python -m sqla_jobs.worker --app" in run.stdout
    assert list(place.iterdir()) == []


def test_ctrl_c_stops_workers_and_server_and_removes_the_directory(place: Path) -> None:
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = ""
        while "Two workers start" not in told:
            line = process.stdout.readline()
            assert line, "it ended too early"
            told += line
        pids = [int(pid) for pid in re.findall(r"\(pid (\d+)\)", told.replace("\n         ", " "))]

        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=60)

    assert process.returncode == 130
    assert complaint == "sqla-jobs demo: interrupted; workers and server are stopped\n"
    assert pids
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("SQLA_JOBS_PG_BIN", "/nonexistent", "SQLA_JOBS_PG_BIN must hold initdb and postgres"),
        ("PYTHONPATH", "stub", "psycopg cannot be imported (no pq wrapper available): pip install"),
    ],
)
def test_what_is_missing_is_said_in_one_sentence(
    place: Path, tmp_path: Path, name: str, value: str, sentence: str
) -> None:
    (tmp_path / "psycopg.py").write_text("raise ImportError('no pq wrapper available.\\nAttempts made:\\n-')")
    environment = os.environ | {name: str(tmp_path) if value == "stub" else value}

    run = subprocess.run(COMMAND, capture_output=True, text=True, env=environment)

    assert run.returncode == 2
    assert run.stderr.startswith(f"sqla-jobs demo: {sentence}")
    assert run.stderr.count("\n") == 1
    assert list(place.iterdir()) == []


def test_too_few_orders_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    demo.add_options(parser)

    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--orders", "99"])

    assert ended.value.code == 2
    assert "100 or more" in capsys.readouterr().err


# -- a broken promise turns the exit code


def test_one_failed_check_makes_it_exit_1_and_shows_the_workers_logs(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tell(*, orders: int, place: Path, screen: Screen) -> list[Check]:
        (place / "mail-1.log").write_text("the worker's last words\n")
        checks = [Check("good", 1, 1), Check("bad", 900, 899, "no receipt for order 7")]
        screen.table(checks)
        return checks

    monkeypatch.setattr(story, "tell", tell)

    code = demo.run(argparse.Namespace(orders=1000, keep=False))

    shown = capsys.readouterr()
    assert code == 1
    assert re.search(r"FAILED +bad +900 +899  no receipt for order 7", shown.out)
    assert "1 of 2 checks FAILED" in shown.err
    assert "the worker's last words" in shown.err
    [kept] = place.iterdir()
    assert str(kept) in shown.err


def test_what_breaks_off_the_demo_makes_it_exit_1_and_is_said(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tell(*, orders: int, place: Path, screen: Screen) -> list[Check]:
        (place / "mail-1.log").write_text("the worker's last words\n")
        raise WorkerEnded("mail-1 (pid 1) ended by itself with exit code 4")

    monkeypatch.setattr(story, "tell", tell)

    code = demo.run(argparse.Namespace(orders=1000, keep=False))

    complaint = capsys.readouterr().err
    assert code == 1
    assert "broke off: mail-1 (pid 1) ended by itself with exit code 4\n" in complaint
    assert "the worker's last words" in complaint


def test_a_worker_that_ends_by_itself_is_noticed(tmp_path: Path) -> None:
    with Staff(url="sqlite://", place=tmp_path, receipts=tmp_path) as staff:
        worker = staff.start()
        worker.wait()

        with pytest.raises(WorkerEnded, match=r"mail-1 \(pid \d+\) ended by itself with exit code 2"):
            staff.must_be_working()

    assert "needs PostgreSQL" in worker.log.read_text()


# -- every check goes red


class Shop(NamedTuple):
    """A shop after a good day."""

    engine: Engine
    ledger: Ledger
    receipts: Path
    lost: frozenset[int]

    def checks(self) -> dict[str, Check]:
        with self.engine.connect() as connection:
            checks = check_all(
                connection,
                orders=ORDERS,
                ledger=self.ledger,
                receipts=self.receipts,
                loss=Loss(KILLED, self.lost, KILL_TIME),
            )
        return {check.name: check for check in checks}

    def red(self) -> dict[str, str]:
        return {name: check.problem for name, check in self.checks().items() if not check.ok}


@pytest.fixture(scope="module")
def good_day(server: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Ledger, Path]:
    """A database that real sessions and a real worker have filled; its name, to be used as a template."""
    receipts = tmp_path_factory.mktemp("receipts")
    url = _psycopg(server.create_database("template_demo"))
    engine = create_engine(url)
    Base.metadata.create_all(engine)
    ledger = Ledger()
    for number in range(ORDERS):
        take_order(engine, ledger, number)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOP_RECEIPTS", str(receipts))
        assert anyio.run(Worker(jobs, url=url, mode="drain").run) == 0
    with engine.begin() as connection:  # what a rescue leaves in the log, as store.settle writes it
        first = select(archive.c.id).order_by(archive.c.id).limit(3)
        log = [{"attempt": 1, "token": 1, "worker": KILLED, "lost": True, "error": "lease lost"}]
        finished = KILL_TIME + timedelta(seconds=2.5)
        connection.execute(
            update(archive).where(archive.c.id.in_(first)).values(attempt_log=log, finished_at=finished)
        )
    engine.dispose()
    return "template_demo", ledger, receipts


@pytest.fixture
def shop(server: EmbeddedPostgres, good_day: tuple[str, Ledger, Path], tmp_path: Path) -> Iterator[Shop]:
    """Its own copy of the good day, to be spoiled."""
    template, ledger, receipts = good_day
    name = f"demo_{next(_numbers)}"
    engine = create_engine(_psycopg(server.create_database(name, template=template)))
    with engine.connect() as connection:
        rescued = archive.c.attempt_log.is_not(None)
        lost = frozenset(connection.scalars(select(archive.c.id).where(rescued)))
    copy = shutil.copytree(receipts, tmp_path / "receipts")
    yield Shop(engine, Ledger(dict(ledger.committed), dict(ledger.rolled_back)), Path(copy), lost)
    engine.dispose()
    server.drop_database(name)


def test_a_good_day_passes_every_check(shop: Shop) -> None:
    assert shop.red() == {}
    assert len(shop.checks()) == 8
    assert shop.checks()["jobs of the killed worker, rescued and done"].note == (
        "the last one 2.5 s after the kill"
    )


def an_order(shop: Shop) -> int:
    return min(shop.ledger.committed)


def a_rolled_back_order(shop: Shop) -> int:
    return min(shop.ledger.rolled_back)


def a_receipt_is_deleted(shop: Shop) -> None:
    _write(shop, delete(Receipt).where(Receipt.order_id == an_order(shop)))


def a_receipt_is_doubled(shop: Shop) -> None:
    text = shop.ledger.committed[an_order(shop)]
    _write(shop, insert(Receipt).values(order_id=an_order(shop), text=text))


def one_receipt_too_many_hides_one_too_few(shop: Shop) -> None:
    first, second, *_ = sorted(shop.ledger.committed)
    _write(shop, update(Receipt).where(Receipt.order_id == first).values(order_id=second))


def a_receipt_has_another_text(shop: Shop) -> None:
    _write(shop, update(Receipt).where(Receipt.order_id == an_order(shop)).values(text="for nothing"))


def a_file_is_deleted(shop: Shop) -> None:
    (shop.receipts / f"{an_order(shop):06}.txt").unlink()


def a_file_is_torn(shop: Shop) -> None:
    file = shop.receipts / f"{an_order(shop):06}.txt"
    file.write_text(file.read_text(encoding="utf-8")[:10], encoding="utf-8")


def a_file_is_nobodys(shop: Shop) -> None:
    (shop.receipts / "999999.txt").write_text("for nobody")


def a_rolled_back_order_has_a_receipt(shop: Shop) -> None:
    _write(shop, insert(Receipt).values(order_id=a_rolled_back_order(shop), text="for nothing"))


def a_rolled_back_order_has_a_file(shop: Shop) -> None:
    (shop.receipts / f"{a_rolled_back_order(shop):06}.txt").write_text("for nothing")


def a_rolled_back_customer_has_an_order(shop: Shop) -> None:
    customer = shop.ledger.rolled_back[a_rolled_back_order(shop)]
    _write(shop, insert(Order).values(customer=customer, item="Cup", cents=1))


def a_rolled_back_order_has_a_job(shop: Shop) -> None:
    payload = {"order": a_rolled_back_order(shop)}
    _write(shop, insert(live).values(queue="mail", kind="send_receipt", payload=payload, status="failed"))


def a_committed_order_is_gone(shop: Shop) -> None:
    _write(shop, delete(Order).where(Order.id == an_order(shop)))


def a_payment_was_not_declined(shop: Shop) -> None:
    del shop.ledger.rolled_back[a_rolled_back_order(shop)]


def a_job_is_still_running(shop: Shop) -> None:
    _write(
        shop,
        insert(live).values(
            queue="mail",
            kind="send_receipt",
            payload={"order": an_order(shop)},
            status="running",
            locked_by="mail-2:1:2",
            locked_until=func.now(),
        ),
    )


def a_job_has_failed(shop: Shop) -> None:
    _write(
        shop, insert(live).values(queue="mail", kind="x", payload={"order": an_order(shop)}, status="failed")
    )


def a_job_ran_for_ever_and_left_no_trace(shop: Shop) -> None:
    _write(shop, delete(archive).where(archive.c.payload["order"].as_integer() == max(shop.ledger.committed)))


def a_job_was_cancelled(shop: Shop) -> None:
    last = archive.c.payload["order"].as_integer() == max(shop.ledger.committed)
    _write(shop, update(archive).where(last).values(status="cancelled"))


def an_order_had_two_jobs(shop: Shop) -> None:
    columns = [column for column in archive.c if column.name != "id"]
    last = archive.c.payload["order"].as_integer() == max(shop.ledger.committed)
    twin = select((archive.c.id + 1_000_000), *columns).where(last)
    _write(shop, insert(archive).from_select(["id", *[column.name for column in columns]], twin))


def a_lost_job_was_not_rescued(shop: Shop) -> None:
    _write(shop, update(archive).where(archive.c.id == min(shop.lost)).values(attempt_log=None))


def a_lost_job_was_lost_by_somebody_else(shop: Shop) -> None:
    log = json.loads(f'[{{"lost": true, "worker": "{KILLED}0"}}]')
    _write(shop, update(archive).where(archive.c.id == min(shop.lost)).values(attempt_log=log))


RECEIPTS = "receipts in the table, one per order"
FILES = "receipt files, one per order, right text"
TRACES = "traces of rolled-back orders"
UNSETTLED = "jobs unsettled or failed"
ARCHIVE = "done jobs in the archive, one per order"
RESCUED = "jobs of the killed worker, rescued and done"


@pytest.mark.parametrize(
    ("spoil", "red"),
    [
        (a_receipt_is_deleted, {RECEIPTS: "no receipt for order 1"}),
        (a_receipt_is_doubled, {RECEIPTS: "more than one receipt for order 1"}),
        (
            one_receipt_too_many_hides_one_too_few,
            {RECEIPTS: "no receipt for order 1; more than one receipt for order 2; a wrong text for order 2"},
        ),
        (a_receipt_has_another_text, {RECEIPTS: "a wrong text for order 1"}),
        (a_file_is_deleted, {FILES: "no file for order 1"}),
        (a_file_is_torn, {FILES: "a wrong text for order 1"}),
        (a_file_is_nobodys, {FILES: "a file for unknown order 999999"}),
        (
            a_rolled_back_order_has_a_receipt,
            {RECEIPTS: "a receipt for unknown order 10", TRACES: "receipt 10"},
        ),
        (a_rolled_back_order_has_a_file, {FILES: "a file for unknown order 10", TRACES: "file 10"}),
        (
            a_rolled_back_customer_has_an_order,
            {"committed orders": "there, but never committed 21", TRACES: "order 21"},
        ),
        (a_rolled_back_order_has_a_job, {UNSETTLED: "1 failed", TRACES: "job 10"}),
        (a_committed_order_is_gone, {"committed orders": "committed, but missing 1"}),
        (a_payment_was_not_declined, {"rolled-back orders": ""}),
        (a_job_is_still_running, {UNSETTLED: "1 running"}),
        (a_job_has_failed, {UNSETTLED: "1 failed"}),
        (a_job_ran_for_ever_and_left_no_trace, {ARCHIVE: "no done job for order 19"}),
        (
            a_job_was_cancelled,
            {ARCHIVE: "no done job for order 19; not done, but archived, for order 19"},
        ),
        (an_order_had_two_jobs, {ARCHIVE: "more than one for order 19"}),
        (a_lost_job_was_not_rescued, {RESCUED: "not so job 1"}),
        (a_lost_job_was_lost_by_somebody_else, {RESCUED: "not so job 1"}),
    ],
    ids=lambda each: each.__name__ if callable(each) else "",
)
def test_a_broken_promise_turns_its_check_red(
    shop: Shop, spoil: Callable[[Shop], None], red: dict[str, str]
) -> None:
    spoil(shop)

    assert shop.red() == red


def test_a_killed_worker_that_held_nothing_proves_nothing(shop: Shop) -> None:
    assert RESCUED in shop._replace(lost=frozenset()).red()


def test_workers_must_end_as_they_were_told() -> None:
    good = check_exits(("mail-1", -9), {"mail-2": 0, "mail-3": 0})
    bad = check_exits(("mail-1", 0), {"mail-2": 0, "mail-3": 6})

    assert [check.ok for check in good] == [True, True]
    assert [check.ok for check in bad] == [False, False]


# -- the screens


@pytest.mark.parametrize("make", [PlainScreen, RichScreen])
def test_a_screen_tells_the_story_and_shows_what_failed(
    make: Callable[[], Screen], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    screen = make()
    screen.say("A shop [opens].")
    screen.progress(written=1, orders=1000, receipts=0, expected=900)
    screen.progress(written=1000, orders=1000, receipts=900, expected=900)
    screen.table([Check("good", 1000, 1000), Check("bad", "0 0", "0 6", "[why] not")])
    screen.close()

    shown = capsys.readouterr().out
    assert re.search(r"\d\.\d s  A shop \[opens\]\.", shown)
    assert re.search(r"ok +good +1,000 +1,000", shown)
    assert re.search(r"FAILED +bad +0 0 +0 6\s+\[why\] not", shown)
    assert re.search("900 of 900|900/900", shown)


def _write(shop: Shop, statement: object) -> None:
    with Session(shop.engine) as session, session.begin():
        session.execute(statement)  # type: ignore[call-overload]


def _psycopg(url: str) -> str:
    return make_url(url).set(drivername="postgresql+psycopg").render_as_string(hide_password=False)


assert ORDERS % DECLINED_EVERY == 0
