"""The plot of the demo: a shop takes orders, two workers send receipts, one of them is killed.

Starts everything, watches through the database, and ends with checks. Decides nothing about right or
wrong (checks does) and prints nothing itself (screen does).
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Engine, Select, column, create_engine, func, make_url, select, table

from sqla_jobs.cli.demo.checks import Check, Loss, check_all, check_exits
from sqla_jobs.cli.demo.orders import DECLINED_EVERY, Cashiers
from sqla_jobs.cli.demo.screen import Screen
from sqla_jobs.cli.demo.shop import Base, Receipt, jobs
from sqla_jobs.cli.demo.workers import LEASE, Staff, WorkerProcess
from sqla_jobs.embedded import EmbeddedPostgres
from sqla_jobs.errors import ConfigurationError

__all__ = ["tell"]

_KILL_AT = 0.4  # of the receipts
_LOOK_EVERY = 0.1
_STALLED = 30.0  # seconds without any change; the checks then say what is missing
_CATCH_LIMIT = 10.0  # seconds to find a worker with jobs in its hands
_QUIET_LIMIT = 5.0
_START_LIMIT = 30.0
_HANDFUL = 5  # jobs

_live = jobs.tables.jobs.c
_backends = table(
    "pg_stat_activity",
    column("application_name"),
    column("state"),
    schema="pg_catalog",
)


class _Counts(NamedTuple):
    receipts: int
    unsettled: int


def tell(*, orders: int, place: Path, screen: Screen) -> list[Check]:
    """Play it all below `place`, where receipts and logs are left, and check it.

    Raises `WorkerEnded`, and what SQLAlchemy raises. `ConfigurationError`, `DatabaseUnreachable`: cannot run.
    """
    _driver_must_load()
    receipts = place / "receipts"
    receipts.mkdir()
    screen.say("Starting a PostgreSQL of our own, with fsync on: what is committed is on disk.")
    with EmbeddedPostgres() as server:
        engine = create_engine(make_url(server.url()).set(drivername="postgresql+psycopg"))
        try:
            Base.metadata.create_all(engine)
            with (
                Staff(url=server.url(), place=place, receipts=receipts) as staff,
                Cashiers(engine) as cashiers,
            ):
                screen.say(
                    f"PostgreSQL {server.version} is up; orders, receipts and background_jobs are created."
                )
                return _Story(orders, receipts, screen, engine, staff, cashiers).play()
        finally:
            engine.dispose()


class _Story:
    """One performance."""

    def __init__(
        self,
        orders: int,
        receipts: Path,
        screen: Screen,
        engine: Engine,
        staff: Staff,
        cashiers: Cashiers,
    ) -> None:
        self._orders = orders
        self._expected = orders - orders // DECLINED_EVERY
        self._receipts = receipts
        self._screen = screen
        self._engine = engine
        self._staff = staff
        self._cashiers = cashiers

    def play(self) -> list[Check]:
        """From the first worker to the last check."""
        first, second = self._staff.start(), self._staff.start()
        self._screen.say(f"Two workers start: {first} and {second}.")
        self._screen.say(
            f"{self._orders:,} customers order. Each order and the job that sends its receipt are one "
            f"transaction. Every {DECLINED_EVERY}th payment is declined after the enqueue: that order is "
            "rolled back, and its job never was."
        )
        half = self._orders // 2
        self._cashiers.take(range(half))
        self._watch(lambda counts: counts.receipts >= _KILL_AT * self._expected)
        self._cashiers.take(range(half, self._orders))  # so that the kill comes among them
        loss = self._kill_one()
        self._watch(lambda counts: self._cashiers.finished() and not counts.unsettled)
        self._wait_for_connections()
        self._screen.say("SIGTERM to the workers: they finish what they run and end by themselves.")
        self._staff.stop()
        self._screen.say("Now look, in the database and in the files:")
        checks = self._check(loss)
        self._screen.table(checks)
        return checks

    def _watch(self, reached: Callable[[_Counts], bool]) -> None:
        """Until it is reached, or nothing has changed for long: then the checks will say what is missing."""
        before: object = None
        changed = time.monotonic()
        while True:
            counts = self._look()
            if reached(counts):
                return
            now = (counts, self._cashiers.ledger.written)
            if now != before:
                before, changed = now, time.monotonic()
            if time.monotonic() - changed > _STALLED:
                self._screen.say(f"Nothing has moved for {_STALLED:.0f} s: waiting no longer.")
                return
            time.sleep(_LOOK_EVERY)

    def _look(self) -> _Counts:
        """How far it is, to the screen too. Raises what went wrong with an order or a worker."""
        self._cashiers.finished()
        self._staff.must_be_working()
        unsettled = _live.status.in_(["ready", "blocked", "running"])
        receipts = select(func.count()).select_from(Receipt).scalar_subquery()
        open_jobs = select(func.count()).select_from(jobs.tables.jobs).where(unsettled).scalar_subquery()
        with self._engine.connect() as connection:
            counts = _Counts(*connection.execute(select(receipts, open_jobs)).one())
        self._screen.progress(
            written=self._cashiers.ledger.written,
            orders=self._orders,
            receipts=counts.receipts,
            expected=self._expected,
        )
        return counts

    def _kill_one(self) -> Loss:
        """SIGKILL to a worker while it holds jobs, and one more worker in its place."""
        victim = self._catch()
        self._staff.kill(victim)
        loss = self._loss_of(victim)
        held = f"{len(loss.jobs)} job{'s' * (len(loss.jobs) != 1)}"
        self._screen.say(
            f"kill -9 of {victim}, with {held} in its hands. It could tell nobody; its leases ({LEASE}) run "
            "out, and then others take its jobs over."
        )
        self._screen.say(f"{self._staff.start()} starts in its place.")
        return loss

    def _catch(self) -> WorkerProcess:
        """Freeze the busier worker while it holds jobs; it stays frozen. Some jobs, while there are many."""
        ends = time.monotonic() + _CATCH_LIMIT
        while True:
            unsettled = self._look().unsettled
            over = time.monotonic() > ends or (self._cashiers.finished() and not unsettled)
            victim = max(self._staff.working, key=lambda worker: len(self._held_by(worker)))
            victim.freeze()
            self._wait_for_quiet(victim, active_only=True)
            held = len(self._held_by(victim))
            if over or held >= (_HANDFUL if unsettled > 10 * _HANDFUL else 1):
                return victim
            victim.thaw()
            time.sleep(0.01)

    def _loss_of(self, victim: WorkerProcess) -> Loss:
        """What it held, read when the server knows that it is gone: from then on nothing of it can commit."""
        self._wait_for_quiet(victim, active_only=False)
        with self._engine.connect() as connection:
            at = connection.scalars(select(func.clock_timestamp())).one()
            rows = connection.execute(_running(victim)).all()
        return Loss(rows[0].locked_by if rows else victim.name, frozenset(row.id for row in rows), at)

    def _held_by(self, worker: WorkerProcess) -> list[int]:
        with self._engine.connect() as connection:
            return [row.id for row in connection.execute(_running(worker))]

    def _wait_for_quiet(self, worker: WorkerProcess, *, active_only: bool) -> None:
        """Until the server has no connection of this worker's, or (`active_only`) none that is at work."""
        mine = _connections_of(worker)
        if active_only:
            mine = mine.where(_backends.c.state == "active")
        ends = time.monotonic() + _QUIET_LIMIT
        with self._engine.connect() as connection:
            while connection.scalar(mine) and time.monotonic() < ends:
                connection.rollback()  # the view is a snapshot of the transaction's first look
                time.sleep(0.005)

    def _wait_for_connections(self) -> None:
        """A worker that is still starting, on a busy machine, answers no SIGTERM yet: it just dies of it."""
        ends = time.monotonic() + _START_LIMIT
        with self._engine.connect() as connection:
            for worker in self._staff.working:
                while not connection.scalar(_connections_of(worker)) and time.monotonic() < ends:
                    connection.rollback()
                    self._look()
                    time.sleep(_LOOK_EVERY)

    def _check(self, loss: Loss) -> list[Check]:
        killed = self._staff.killed
        assert killed is not None
        with self._engine.connect() as connection:
            checks = check_all(
                connection,
                orders=self._orders,
                ledger=self._cashiers.ledger,
                receipts=self._receipts,
                loss=loss,
            )
        exits = {worker.name: worker.exit_code for worker in self._staff.working}
        return checks + check_exits((killed.name, killed.exit_code), exits)


def _driver_must_load() -> None:
    """Better before a server is made than after."""
    try:
        create_engine("postgresql+psycopg://")
    except ImportError as error:  # psycopg without libpq says so in five lines
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ConfigurationError(
            f"psycopg cannot be imported ({reason}): pip install 'sqla_jobs[embedded]'"
        ) from error


def _connections_of(worker: WorkerProcess) -> Select[int]:
    """Its name reaches the server as PGAPPNAME."""
    return select(func.count()).where(_backends.c.application_name == worker.name)


def _running(worker: WorkerProcess) -> Select[int, str | None]:
    """locked_by begins with the worker's name and process id."""
    mine = _live.locked_by.startswith(f"{worker.name}:{worker.pid}:", autoescape=True)
    return select(_live.id, _live.locked_by).where(_live.status == "running", mine)
