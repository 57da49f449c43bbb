"""`sqla-jobs demo`: orders, receipts, a worker that is killed, and a table of what must hold.

Assumes nothing but PostgreSQL's programs: brings up its own server and leaves nothing behind (killed with
-9, a directory of receipts). Exit code: 0 everything holds, 1 something does not, 2 it cannot run here,
128 + signal when it was interrupted.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from sqla_jobs.errors import ConfigurationError, SqlaJobsError

__all__ = ["add_options", "run"]

_FEWEST_ORDERS = 100
_LAST_LINES = 15  # of a worker's log


@dataclass
class _Place:
    """Where receipts and logs are, and whether they stay."""

    path: Path
    keep: bool


class _Stopped(KeyboardInterrupt):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _orders(text: str) -> int:
    if not text.isdecimal() or int(text) < _FEWEST_ORDERS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number of {_FEWEST_ORDERS} or more: fewer are done before a worker can "
            "be killed among them"
        )
    return int(text)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to `parser`."""
    parser.add_argument(
        "--orders", type=_orders, default=1000, metavar="N", help="how many orders come in (default: 1000)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the receipts and the workers' logs")


def run(arguments: argparse.Namespace) -> int:
    """Play the demo; the exit code."""
    started = time.monotonic()
    try:
        with _one_stop(), _own_settings(), _temporary_directory(keep=arguments.keep) as place:
            return _play(arguments.orders, place, started=started)
    except _Stopped as stopped:
        _complain("interrupted; workers and server are stopped")
        return 128 + stopped.number
    except SqlaJobsError as error:
        _complain(str(error))
        return 2
    except BrokenPipeError:  # `sqla-jobs demo | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered has to go somewhere
        return 1


def _play(orders: int, place: _Place, *, started: float) -> int:
    # here and not above: whoever asks for --help waits for none of it
    from sqlalchemy.exc import SQLAlchemyError

    from sqla_jobs.cli.demo.screen import choose_screen
    from sqla_jobs.cli.demo.story import tell
    from sqla_jobs.cli.demo.workers import WorkerEnded
    from sqla_jobs.store.door import brief

    screen = choose_screen()
    try:
        checks = tell(orders=orders, place=place.path, screen=screen)
    except BrokenPipeError:
        raise
    except (SQLAlchemyError, OSError, WorkerEnded) as error:
        screen.close()
        _complain(f"broke off: {error if isinstance(error, WorkerEnded) else brief(error)}")
        _show_logs(place)
        return 1
    finally:
        screen.close()
    failed = sum(not check.ok for check in checks)
    if failed:
        _complain(f"{failed} of {len(checks)} checks FAILED")
        _show_logs(place)
        return 1
    seconds = time.monotonic() - started
    print(
        f"All {len(checks)} hold: none lost, none booked twice, none for a rolled-back order.\n"
        f"{seconds:.1f} s in all, with a server made and removed.\n\n{_next_steps()}",
        flush=True,
    )
    return 0


def _next_steps() -> str:
    shop = Path(__file__).with_name("shop.py")
    return (
        f"Next, in your own application (README: {_readme()}):\n"
        "  1. the table, in your metadata:  class Job(JobMixin, Base)\n"
        '     alembic revision --autogenerate -m "add jobs" && alembic upgrade head\n'
        "  2. a worker, on your database (it reads DATABASE_URL):\n"
        "     python -m sqla_jobs.worker --app app.tasks:jobs\n"
        f"The shop that you have just seen: {shop}"
    )


def _readme() -> Path:
    """In a checkout the file; installed, the metadata, whose body is the README."""
    root = Path(__file__).parents[3]
    if (root / "README.md").is_file() and (root / "pyproject.toml").is_file():
        return root / "README.md"
    with suppress(PackageNotFoundError):
        for file in files("sqla_jobs") or ():
            if file.name == "METADATA":
                return Path(str(file.locate())).resolve()
    return Path("README.md")


def _complain(text: str) -> None:
    sys.stdout.flush()
    print(f"sqla-jobs demo: {text}", file=sys.stderr, flush=True)


def _show_logs(place: _Place) -> None:
    """What the workers said last; their logs stay."""
    for log in sorted(place.path.glob("*.log")):
        place.keep = True
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        print(f"\n-- the end of {log}:", *lines or ["(empty)"], sep="\n   ", file=sys.stderr)
    sys.stderr.flush()


@contextmanager
def _temporary_directory(*, keep: bool) -> Iterator[_Place]:
    try:
        place = _Place(Path(tempfile.mkdtemp(prefix="sqla-jobs-demo-")), keep)
    except OSError as error:
        raise ConfigurationError(f"no temporary directory can be made, set TMPDIR: {error}") from error
    try:
        yield place
    finally:
        if place.keep:
            _complain(f"receipts and the workers' logs are kept in {place.path}")
        else:
            shutil.rmtree(place.path, ignore_errors=True)


@contextmanager
def _own_settings() -> Iterator[None]:
    """Hide what would lead us, or our workers, to another server or to other options."""
    prefixes, names = ("PG", "SQLA_JOBS_"), {"DATABASE_URL", "QUEUE_NAME", "WORKER_CONCURRENCY"}
    foreign = {
        name: value
        for name, value in os.environ.items()
        if (name.startswith(prefixes) and name != "SQLA_JOBS_PG_BIN") or name in names
    }
    for name in foreign:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(foreign)


@contextmanager
def _one_stop() -> Iterator[None]:
    """Ctrl-C, SIGTERM or a closed terminal end the demo once; the cleaning up is short, and not cut."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop(number: int, _: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise _Stopped(number)

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
