"""A worker as a program: signals, logs and exit codes.

0 clean, 1 forced by a second signal, 2 usage, 3 app not importable or no task, 4 schema missing or
older, 5 database unreachable past the start-up limit, 6 drain timed out, 7 recycled (enough jobs, run
time or memory, or an attempt stuck in a thread).

SIGTERM and SIGINT: once, drain; twice, cancel what runs and give it back; three times, or SIGQUIT: end at
once, and leave the jobs to their leases. SIGUSR1: claim nothing any more, but stay. SIGUSR2: write the
stacks of all threads to stderr.
"""

import argparse
import asyncio
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from sqla_jobs.errors import (
    AppError,
    ConfigurationError,
    DatabaseUnreachable,
    SchemaMismatch,
    SqlaJobsError,
    TaskDefinitionError,
)
from sqla_jobs.events import Events
from sqla_jobs.telemetry.logs import configure, log_events
from sqla_jobs.worker.loop import CLEAN, FORCED, Worker
from sqla_jobs.worker.options import Parser, add_options, as_given, make_worker, resolved
from sqla_jobs.worker.supervisor import SUPERVISED, Supervisor

__all__ = ["main", "run"]

_EXIT_CODES: tuple[tuple[type[SqlaJobsError], int], ...] = (
    (AppError, 3),
    (TaskDefinitionError, 3),
    (SchemaMismatch, 4),
    (DatabaseUnreachable, 5),
    (SqlaJobsError, 2),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run; the exit code."""
    parser = Parser(prog="python -m sqla_jobs.worker", description="Run the jobs of some queues.")
    add_options(parser)
    return run(parser.parse_args(arguments))


def run(arguments: argparse.Namespace) -> int:
    """Run a worker as parsed arguments say, until it ends; the exit code."""
    # taken out: what a handler starts is not supervised by whoever supervises us
    pipe, _, quiet = os.environ.pop(SUPERVISED, "").partition(" ")
    try:
        options = resolved(arguments, os.environ)
        configure(level=options["log_level"], form=options["log_format"])
        events = Events()
        log_events(events)
        if options["processes"] > 1 and options["health_bind"] is not None:
            raise ConfigurationError("--health-bind is for one process: the children would want one address")
        if options["processes"] > 1 and not pipe and not arguments.check:
            return _supervise(arguments, options, events)
        worker, source = make_worker(options, events=events)
        logging.getLogger("sqla_jobs").info("database", extra={"fields": {"url": source}})
        if quiet:
            worker.quiet()
        return _check(worker) if arguments.check else _run(worker, pipe)
    except SqlaJobsError as error:
        sys.stderr.write(f"sqla_jobs worker: {error}\n")
        return next(code for cls, code in _EXIT_CODES if isinstance(error, cls))


def _supervise(arguments: argparse.Namespace, options: Mapping[str, Any], events: Events) -> int:
    supervisor = Supervisor(
        ["-m", "sqla_jobs.worker", *as_given(arguments)],
        count=options["processes"],
        endless=options["mode"] == "continuous",
        events=events,
    )
    return asyncio.run(supervisor.run())


def _check(worker: Worker) -> int:
    asyncio.run(worker.check())
    kinds = ", ".join(sorted(worker.jobs.tasks))
    sys.stdout.write(f"a worker could start: queues {', '.join(worker.queues)}; kinds {kinds}\n")
    return CLEAN


def _run(worker: Worker, pipe: str) -> int:
    """Run the worker's loop to its end.

    A SystemExit in a task that a handler has started leaves the loop, as asyncio will have it. The loop
    goes on: the handler that awaits the task gets the exception too, and its attempt has failed.
    """
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        asyncio.set_event_loop(loop)
        main = loop.create_task(_until_signalled(worker, pipe))
        while True:
            try:
                return loop.run_until_complete(main)
            except (SystemExit, KeyboardInterrupt) as error:
                if main.done():
                    raise
                worker.events.emit("loop.crashed", loop="worker", error=repr(error), retry_in=0.0)


async def _until_signalled(worker: Worker, pipe: str) -> int:
    _listen(worker)
    if pipe.isdecimal():
        # nothing is ever written to it: readable means that the supervisor is gone
        loop = asyncio.get_running_loop()
        loop.add_reader(int(pipe), _orphaned, loop, int(pipe), worker)
    code = await worker.run()
    if code != CLEAN or worker.left_behind or not await _threads_have_ended():
        _leave(code)
    return code


async def _threads_have_ended() -> bool:
    """Whether Python's own farewell would wait for nobody: a thread of a handler's own, say in to_thread."""
    executor = asyncio.ensure_future(asyncio.get_running_loop().shutdown_default_executor())
    await asyncio.wait({executor}, timeout=0.5)
    others = {thread for thread in threading.enumerate() if not thread.daemon} - {threading.main_thread()}
    return executor.done() and not others


def _listen(worker: Worker) -> None:
    loop = asyncio.get_running_loop()
    signals = 0

    def stop() -> None:
        nonlocal signals
        signals += 1
        if signals > 2:
            _leave(FORCED)
        worker.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGQUIT, _leave, FORCED)
    loop.add_signal_handler(signal.SIGUSR1, worker.quiet)
    # in C and at once: a loop that is blocked is when somebody wants to know
    with suppress(OSError, ValueError):  # a stderr that is no file
        faulthandler.register(signal.SIGUSR2, all_threads=True, chain=False)


def _orphaned(loop: asyncio.AbstractEventLoop, pipe: int, worker: Worker) -> None:
    loop.remove_reader(pipe)
    worker.stop()


def _leave(code: int) -> None:
    """End at once, from inside the loop.

    A thread that cannot be stopped, or a coroutine that swallows its end, may still run a handler; its
    job is given back already, and the loop's own farewell would wait for it.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
