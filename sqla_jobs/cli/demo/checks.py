"""What must hold after the demo: compared with the ledger, read from the database and from the files.

Every promise is a Check with what was expected and what was found; none is assumed. Reads only.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from sqlalchemy import Connection, func, select

from sqla_jobs.cli.demo.orders import DECLINED_EVERY, Ledger
from sqla_jobs.cli.demo.shop import Order, Receipt, jobs

__all__ = ["Check", "Loss", "check_all", "check_exits"]

_live, _archive = jobs.tables.jobs.c, jobs.tables.archive.c


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table. `problem` names what is wrong beyond the numbers, `note` what else to know."""

    name: str
    expected: int | str
    found: int | str
    problem: str = ""
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether it holds."""
        return self.expected == self.found and not self.problem


@dataclass(frozen=True, slots=True)
class Loss:
    """What a killed worker held: its locked_by, the jobs that were running there, and when they were read."""

    worker: str
    jobs: frozenset[int]
    at: datetime


def check_all(
    connection: Connection, *, orders: int, ledger: Ledger, receipts: Path, loss: Loss
) -> list[Check]:
    """Every check of the database and of the files; `orders` is how many were asked for."""
    files = {file.stem: file.read_text(encoding="utf-8") for file in receipts.glob("*.txt")}
    return [
        *_orders(connection, orders, ledger),
        _receipts(connection, ledger),
        _files(files, ledger),
        _traces_of_rolled_back(connection, files, ledger),
        _unsettled(connection),
        _archived(connection, ledger),
        _rescued(connection, loss),
    ]


def check_exits(killed: tuple[str, int | None], stopped: Mapping[str, int | None]) -> list[Check]:
    """How the workers ended: one by SIGKILL, the others by themselves after SIGTERM."""
    name, code = killed
    names = ", ".join(stopped)
    zeros = " ".join("0" for _ in stopped)
    return [
        Check(f"exit code of {name} (killed)", "-9", str(code)),
        Check(f"exit codes of {names} (SIGTERM)", zeros, " ".join(map(str, stopped.values()))),
    ]


def _orders(connection: Connection, asked: int, ledger: Ledger) -> list[Check]:
    declined = asked // DECLINED_EVERY
    ids = set(connection.scalars(select(Order.id)))
    problem = _problem(
        ("committed, but missing", ledger.committed.keys() - ids),
        ("there, but never committed", ids - ledger.committed.keys()),
    )
    return [
        Check("committed orders", asked - declined, len(ids), problem),
        Check("rolled-back orders", declined, len(ledger.rolled_back)),
    ]


def _receipts(connection: Connection, ledger: Ledger) -> Check:
    """Their number alone would hide one too many beside one too few."""
    rows = connection.execute(select(Receipt.order_id, Receipt.text)).all()
    times = Counter(row.order_id for row in rows)
    problem = _problem(
        ("no receipt for order", ledger.committed.keys() - times.keys()),
        ("more than one receipt for order", (each for each, n in times.items() if n > 1)),
        ("a receipt for unknown order", times.keys() - ledger.committed.keys()),
        ("a wrong text for order", _wrong({row.order_id: row.text for row in rows}, ledger)),
    )
    return Check("receipts in the table, one per order", len(ledger.committed), len(rows), problem)


def _files(files: Mapping[str, str], ledger: Ledger) -> Check:
    texts = {int(stem): text for stem, text in files.items() if stem.isdecimal()}
    problem = _problem(
        ("no file for order", ledger.committed.keys() - texts.keys()),
        ("a file for unknown order", texts.keys() - ledger.committed.keys()),
        ("a wrong text for order", _wrong(texts, ledger)),
    )
    return Check("receipt files, one per order, right text", len(ledger.committed), len(files), problem)


def _traces_of_rolled_back(connection: Connection, files: Mapping[str, str], ledger: Ledger) -> Check:
    """By id and by name: a sequence never gives a number twice, and no two customers share a name."""
    gone, customers = ledger.rolled_back.keys(), set(ledger.rolled_back.values())
    rows = connection.execute(select(Order.id, Order.customer))
    orders = [order for order, customer in rows if order in gone or customer in customers]
    receipts = [each for each in connection.scalars(select(Receipt.order_id)) if each in gone]
    live, archived = (
        connection.scalars(select(c.payload["order"].as_integer())).all() for c in (_live, _archive)
    )
    with_file = [int(stem) for stem in files if stem.isdecimal() and int(stem) in gone]
    with_job = [each for each in (*live, *archived) if each in gone]
    found = len(orders) + len(receipts) + len(with_file) + len(with_job)
    problem = _problem(("order", orders), ("receipt", receipts), ("file", with_file), ("job", with_job))
    note = "" if found else "no order, job, receipt or file"
    return Check("traces of rolled-back orders", 0, found, problem, note)


def _unsettled(connection: Connection) -> Check:
    """A done job leaves the jobs table, so that it must be empty: failed ones would stay there too."""
    counts = connection.execute(select(_live.status, func.count()).group_by(_live.status)).all()
    problem = ", ".join(f"{count} {status}" for status, count in sorted(map(tuple, counts)))
    return Check("jobs unsettled or failed", 0, sum(count for _, count in counts), problem)


def _archived(connection: Connection, ledger: Ledger) -> Check:
    rows = connection.execute(select(_archive.payload["order"].as_integer(), _archive.status)).all()
    times = Counter(order for order, status in rows if status == "done")
    problem = _problem(
        ("no done job for order", ledger.committed.keys() - times.keys()),
        ("more than one for order", (each for each, n in times.items() if n > 1)),
        ("one for unknown order", times.keys() - ledger.committed.keys()),
        ("not done, but archived, for order", (order for order, status in rows if status != "done")),
    )
    return Check("done jobs in the archive, one per order", len(ledger.committed), len(rows), problem)


def _rescued(connection: Connection, loss: Loss) -> Check:
    """A rescue leaves a line in the job's attempt log: whose lease was lost."""
    name = "jobs of the killed worker, rescued and done"
    c = _archive
    columns = (c.id, c.status, c.locked_by, c.attempt_log, c.finished_at)
    rows = connection.execute(select(*columns).where(c.id.in_(loss.jobs))).all()
    rescued = {
        row.id: row.finished_at
        for row in rows
        if row.status == "done"
        and row.locked_by != loss.worker
        and any(entry["lost"] and entry["worker"] == loss.worker for entry in row.attempt_log or ())
    }
    if not loss.jobs:
        return Check(name, "1 or more", 0, "it held none when it was killed")
    problem = _problem(("not so job", loss.jobs - rescued.keys()))
    seconds = max(((at - loss.at).total_seconds() for at in rescued.values()), default=0.0)
    note = f"the last one {seconds:.1f} s after the kill" if rescued else ""
    return Check(name, len(loss.jobs), len(rescued), problem, note)


def _wrong(texts: Mapping[int, str], ledger: Ledger) -> Iterable[int]:
    return (each for each, text in texts.items() if ledger.committed.get(each, text) != text)


def _problem(*groups: tuple[str, Iterable[int]]) -> str:
    """`no receipt for order 3, 7; ...`: whoever reads it wants to know which."""
    sentences = []
    for what, members in groups:
        ids = sorted(set(members))
        if ids:
            more = f" and {len(ids) - 5} more" if len(ids) > 5 else ""
            sentences.append(f"{what} {', '.join(map(str, ids[:5]))}{more}")
    return "; ".join(sentences)
