"""Real worker processes for the tests that kill them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TESTS = Path(__file__).parent


class WorkerProcess:
    """`python -m sqla_jobs.worker` on the shop, its log in a file."""

    def __init__(self, url: str, log: Path, *options: str, app: str, folder: Path) -> None:
        self.log = log
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        # what leads this process to the code under test leads that one too
        path = os.pathsep.join([str(folder), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment |= {"DATABASE_URL": url, "PYTHONPATH": path, "PYTHONWARNINGS": "error"}
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sqla_jobs.worker", "--app", app, *options],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=folder,
            )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.process.pid

    def descriptors(self) -> int:
        """How many it has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def processor_seconds(self) -> float:
        """What it has used of the processor, its own code and the system's."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        """Of memory."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def freeze(self) -> None:
        """SIGSTOP: it does nothing and does not know it."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL: no drain, no farewell."""
        self.process.kill()
        self.process.wait(20)

    def stop(self) -> int:
        """SIGTERM, and wait; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(40)

    def wait(self) -> int:
        """Wait for its end; the exit code."""
        return self.process.wait(40)

    def text(self) -> str:
        """What it has logged."""
        return self.log.read_text(errors="replace")


@contextmanager
def worker_process(
    url: str, log: Path, *options: str, app: str = "shop:jobs", folder: Path = TESTS
) -> Iterator[WorkerProcess]:
    """A worker that is killed at the end of the block if it still lives."""
    worker = WorkerProcess(url, log, *options, app=app, folder=folder)
    try:
        yield worker
    finally:
        if worker.process.poll() is None:
            worker.kill()
