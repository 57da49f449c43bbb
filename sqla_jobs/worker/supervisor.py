"""Several worker processes under one: `--processes N`. Starts them again when they end before their time.

Knows nothing of jobs and opens no connection. A child that recycles (exit code 7) or crashes gets a
successor; one that cannot start (2, 3, 4) ends them all. If the supervisor itself is killed, its children
notice the end of a pipe and drain.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from sqla_jobs.events import Events

__all__ = ["SUPERVISED", "Supervisor"]

#: In a child's environment: the descriptor of a pipe that ends when its supervisor does; and "quiet" if it
#: is to claim nothing (a signal could come before it is listened to).
SUPERVISED = "SQLA_JOBS_SUPERVISED"

_CANNOT_START = frozenset({2, 3, 4})
_UNREACHABLE, _KILLED, _RECYCLED = 5, 1, 7
#: A child that lived so long did not fail at its start: its successor starts at once.
_SETTLED = 30.0
_LONGEST_PAUSE = 30.0


class Supervisor:
    """Keeps `count` processes of `command` alive until it is stopped, or until they have all ended well."""

    def __init__(self, command: Sequence[str], *, count: int, endless: bool, events: Events) -> None:
        self._command = command
        self._count = count
        self._endless = endless
        self._events = events
        self._children: set[asyncio.subprocess.Process] = set()
        self._signals = 0
        self._quiet = False
        self._failed: int | None = None

    async def run(self) -> int:
        """The exit code: of the child that could not start, or the worst of those that ended."""
        self._stopping = asyncio.Event()
        self._pipe, ours = os.pipe()
        self._listen()
        try:
            codes = await asyncio.gather(*[self._keep() for _ in range(self._count)])
        finally:
            os.close(ours)
            os.close(self._pipe)
        return max(codes) if self._failed is None else self._failed

    # -- signals

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGUSR1, self._be_quiet)
        loop.add_signal_handler(signal.SIGUSR2, self._send, signal.SIGUSR2)
        loop.add_signal_handler(signal.SIGQUIT, self._quit)

    def _stop(self) -> None:
        """Once: drain. Twice: at once. Three times: they are killed, and their leases run out."""
        self._signals += 1
        self._stopping.set()
        # one that has heard of the end from us already (another could not start) has not heard of this one
        first = self._signals == 1 and self._failed is not None
        if not first:
            self._send(signal.SIGKILL if self._signals > 2 else signal.SIGTERM)

    def _quit(self) -> None:
        self._stopping.set()
        self._send(signal.SIGQUIT)

    def _be_quiet(self) -> None:
        """Those who come later too."""
        self._quiet = True
        self._send(signal.SIGUSR1)

    def _fail(self, code: int) -> None:
        """One cannot start, so none can: the others drain."""
        if self._failed is None and not self._signals:
            self._failed = code
            self._stopping.set()
            self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> None:
        for child in self._children:
            self._send_to(child, number)

    def _send_to(self, child: asyncio.subprocess.Process, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            child.send_signal(number)

    # -- one child and its successors

    async def _keep(self) -> int:
        pause, first = 1.0, True
        while not self._stopping.is_set():
            began = time.monotonic()
            code = await self._one()
            lived = time.monotonic() - began
            if self._stopping.is_set():
                return _KILLED if code < 0 else 0 if code == _RECYCLED else code
            if code in _CANNOT_START or (code == _UNREACHABLE and first):
                self._events.emit("process.ended", exit_code=code, retry_in=None)
                self._fail(code)
                return code
            if code == 0 and not self._endless:
                return 0
            pause = 1.0 if lived > _SETTLED else min(pause * 2, _LONGEST_PAUSE)
            wait = 0.0 if code in (0, _RECYCLED) and lived > _SETTLED else pause
            self._events.emit("process.ended", exit_code=code, retry_in=wait)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._stopping.wait()
            first = False
        return 0

    async def _one(self) -> int:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=(self._pipe,),
            env=os.environ | {SUPERVISED: f"{self._pipe}{' quiet' if self._quiet else ''}"},
            # Ctrl-C at a terminal reaches us alone: passed on as well, it would count twice
            start_new_session=True,
        )
        self._children.add(child)
        if self._stopping.is_set():
            self._send_to(child, signal.SIGTERM)  # it came while this one was being started
        self._events.emit("process.started", pid=child.pid)
        try:
            return await child.wait()
        finally:
            self._children.discard(child)
