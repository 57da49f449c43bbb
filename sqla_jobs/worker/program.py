"""A worker as a program: signals, logs and exit codes.

0 clean, 1 forced by a second signal, 2 usage, 3 app not importable or no task, 4 schema missing or
older, 5 database unreachable past the start-up limit, 6 drain timed out.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence

from sqla_jobs.errors import (
    AppError,
    DatabaseUnreachable,
    SchemaMismatch,
    SqlaJobsError,
    TaskDefinitionError,
)
from sqla_jobs.events import Events
from sqla_jobs.telemetry.logs import configure, log_events
from sqla_jobs.worker.loop import CLEAN, Worker
from sqla_jobs.worker.options import Parser, add_options, make_worker, resolved

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
    try:
        options = resolved(arguments, os.environ)
        configure(level=options["log_level"], form=options["log_format"])
        events = Events()
        log_events(events)
        worker, source = make_worker(options, events=events)
        logging.getLogger("sqla_jobs").info("database", extra={"fields": {"url": source}})
        return _run(worker)
    except SqlaJobsError as error:
        sys.stderr.write(f"sqla_jobs worker: {error}\n")
        return next(code for cls, code in _EXIT_CODES if isinstance(error, cls))


def _run(worker: Worker) -> int:
    """Run the worker's loop to its end.

    A SystemExit in a task that a handler has started leaves the loop, as asyncio will have it. The loop
    goes on: the handler that awaits the task gets the exception too, and its attempt has failed.
    """
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        asyncio.set_event_loop(loop)
        main = loop.create_task(_until_signalled(worker))
        while True:
            try:
                return loop.run_until_complete(main)
            except (SystemExit, KeyboardInterrupt) as error:
                if main.done():
                    raise
                worker.events.emit("loop.crashed", loop="worker", error=repr(error), retry_in=0.0)


async def _until_signalled(worker: Worker) -> int:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop)
    code = await worker.run()
    if code != CLEAN:
        _leave(code)
    return code


def _leave(code: int) -> None:
    """End at once, from inside the loop.

    A thread that cannot be stopped, or a coroutine that swallows its end, may still run a handler; its
    job is given back already, and the loop's own farewell would wait for it.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
