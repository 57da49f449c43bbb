"""The demo's workers: real processes, started like yours, with their logs in files.

They die with the demo, whatever ends it (on Linux). Does not look into the database.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

__all__ = ["LEASE", "Staff", "WorkerEnded", "WorkerProcess"]

#: The shortest there is: what a killed worker held comes back soon, while you watch.
LEASE = "2s"
_STOP_LIMIT = 40.0  # seconds; longer than the worker's own drain limit

# Between fork and exec, as a program of its own (preexec_fn may deadlock beside threads): die with the demo.
_LEASH = """
import ctypes, os, signal, sys
owner, *command = sys.argv[1:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != int(owner):
        sys.exit("the demo is gone")
os.execv(command[0], command)
"""


class WorkerEnded(Exception):
    """A worker ended that nobody had told to."""


class WorkerProcess:
    """One `python -m sqla_jobs.worker`."""

    def __init__(self, name: str, *, log: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        worker = [sys.executable, "-m", "sqla_jobs.worker", "--app", "sqla_jobs.cli.demo.shop:jobs"]
        worker += ["--lease", LEASE, "--name", name]
        with log.open("wb") as output:
            self._process = subprocess.Popen(  # noqa: S603 - our own command
                [sys.executable, "-I", "-S", "-c", _LEASH, str(os.getpid()), *worker],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=log.parent,
                env=dict(environment) | {"PGAPPNAME": name},
                start_new_session=True,  # Ctrl-C in the terminal is the demo's to answer
            )

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"

    @property
    def pid(self) -> int:
        """Its process id, part of what it writes into locked_by."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number when one ended it."""
        return self._process.poll()

    def freeze(self) -> None:
        """Let it stand still, so that what it holds can be counted."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL: it cannot give anything back, not even say goodbye."""
        self._process.kill()
        self._process.wait()

    def ask_to_stop(self) -> None:
        """SIGTERM, as from systemd or Kubernetes."""
        self._process.terminate()

    def wait(self) -> None:
        """Until it has ended; one that does not within its limit is killed, and its exit code says so."""
        try:
            self._process.wait(_STOP_LIMIT)
        except subprocess.TimeoutExpired:
            self.kill()


class Staff:
    """All workers of the demo, in the order of their start."""

    def __init__(self, *, url: str, place: Path, receipts: Path) -> None:
        self.all: list[WorkerProcess] = []
        self.killed: WorkerProcess | None = None
        self._place = place
        # our own import path, so that a worker finds this very library, installed or not
        path = os.pathsep.join(each or str(Path.cwd()) for each in sys.path)
        ours = {"DATABASE_URL": url, "SHOP_RECEIPTS": str(receipts), "PYTHONPATH": path}
        self._environment = dict(os.environ) | ours

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.all:
            if worker.exit_code is None:
                worker.kill()

    @property
    def working(self) -> list[WorkerProcess]:
        """Those that were not killed."""
        return [worker for worker in self.all if worker is not self.killed]

    def start(self) -> WorkerProcess:
        """One more worker; returns before it is ready."""
        name = f"mail-{len(self.all) + 1}"
        worker = WorkerProcess(name, log=self._place / f"{name}.log", environment=self._environment)
        self.all.append(worker)
        return worker

    def kill(self, worker: WorkerProcess) -> None:
        """Kill this one; from now on it is expected to be dead."""
        self.killed = worker
        worker.kill()

    def must_be_working(self) -> None:
        """Raise `WorkerEnded` if one ended by itself."""
        for worker in self.working:
            if worker.exit_code is not None:
                raise WorkerEnded(f"{worker} ended by itself with exit code {worker.exit_code}")

    def stop(self) -> None:
        """SIGTERM to all at once, then wait for each."""
        for worker in self.working:
            worker.ask_to_stop()
        for worker in self.working:
            worker.wait()
