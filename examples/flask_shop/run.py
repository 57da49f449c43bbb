"""Play the shop: a private PostgreSQL, migrated; a real worker; real requests; every result checked.

The application is in app/. Leaves nothing behind, also when it fails or is interrupted.
"""

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from app import create_app
from app.models import Activity, Job, Order, Receipt, db
from flask import Flask
from sqlalchemy import func, select
from werkzeug.serving import make_server

from sqla_jobs.embedded import EmbeddedPostgres

HERE = Path(__file__).resolve().parent
PATIENCE = 30.0  # seconds
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WorkerProcess = subprocess.Popen[bytes]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="flask-shop-") as folder, EmbeddedPostgres() as postgres:
        place = Path(folder)
        logging.basicConfig(filename=place / "web.log", level=logging.WARNING)
        settings = environment(DATABASE_URL=postgres.url())
        app = create_app({"SQLALCHEMY_DATABASE_URI": postgres.url()})
        try:
            migrate(place, settings)
            with website(app) as client, worker(place / "worker.log", settings) as process:
                play(app, client, process)
        except Exception:
            for log in sorted(place.glob("*.log")):
                print(f"-- {log.name}:\n{log.read_text()}", file=sys.stderr)
            raise


def play(app: Flask, client: httpx.Client, process: WorkerProcess) -> None:
    """What this example shows."""
    tea = {"customer": "Ada", "item": "tea", "card": "4711"}

    answer = client.post("/orders", json=tea)
    check(answer.status_code == 201, f"POST /orders is {answer.status_code}: {answer.json()}")

    url = f"/jobs/{answer.json()['job']}"
    wait_for(lambda: client.get(url).json()["status"] == "done", process)
    check(client.get(url).json()["attempts"] == 1, f"GET {url}: {client.get(url).json()}")
    with app.app_context():
        texts = db.session.scalars(select(Receipt.text)).all()
        notes = db.session.scalars(select(Activity.text).order_by(Activity.id)).all()
    check(texts == ["The Tea Shop thanks Ada for order 1: tea"], f"receipts: {texts}")
    check(notes == ["Ada ordered", "receipt for order 1 sent"], f"activities: {notes}")

    answer = client.post("/orders", json=tea | {"card": "0000"})
    check(answer.status_code == 402, f"POST /orders with a declined card is {answer.status_code}")
    check("your bank says no" in answer.text, "an error page says why")
    with app.app_context():
        counts = [db.session.scalar(select(func.count()).select_from(each)) for each in (Order, Job)]
    check(counts == [1, 0], "it left no order and no job")

    process.terminate()
    check(process.wait(PATIENCE) == 0, "SIGTERM: the worker finishes and exits with 0")


@contextmanager
def website(app: Flask) -> Iterator[httpx.Client]:
    """The application behind a real HTTP server, in a thread."""
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{server.server_port}", trust_env=False) as client:
            yield client
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        with app.app_context():
            db.engine.dispose()


# -- the same in every example: a database, a worker, and how to wait


def environment(**settings: str) -> dict[str, str]:
    """Ours, without what would lead a worker to another database or to other options."""
    foreign = ("PG", "SQLA_JOBS_", "DATABASE_URL", "QUEUE_NAME", "WORKER_CONCURRENCY")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)} | settings


def migrate(place: Path, settings: dict[str, str]) -> None:
    """What README.md says by hand, in a folder of its own."""
    template = subprocess.check_output([sys.executable, "-m", "sqla_jobs", "template"], text=True).strip()
    alembic = [sys.executable, "-m", "alembic", "-c", str(place / "alembic.ini")]
    run([*alembic, "init", "-t", template, str(place / "migrations")], settings)
    run([*alembic, "revision", "--autogenerate", "-m", "add the shop and its jobs"], settings)
    run([*alembic, "upgrade", "head"], settings)


def run(command: list[str], settings: dict[str, str]) -> None:
    done = subprocess.run(command, cwd=HERE, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


@contextmanager
def worker(log: Path, settings: dict[str, str]) -> Iterator[WorkerProcess]:
    """A real worker, ended with the block."""
    command = [sys.executable, "-m", "sqla_jobs.worker", "--app", "app.worker:jobs"]
    with (
        log.open("wb") as file,
        subprocess.Popen(command, cwd=HERE, env=settings, stdout=file, stderr=file) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()  # does nothing to one that has ended
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_for(condition: Callable[[], bool], process: WorkerProcess) -> None:
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, f"the worker has ended with {process.poll()}"
        assert time.monotonic() < ends, f"not within {PATIENCE:g} s"
        time.sleep(0.05)


def check(holds: bool, what: str) -> None:
    assert holds, what
    print(f"ok  {what}", flush=True)


def stop(number: int, _: object) -> None:
    """Ctrl-C, SIGTERM or a closed terminal: once, so that what follows is not cut."""
    for each in STOPS:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


if __name__ == "__main__":
    for each in STOPS:
        signal.signal(each, stop)
    main()
