"""`sqla-jobs worker`: the same program as `python -m sqla_jobs.worker`."""

import argparse

from sqla_jobs.worker.signals import end_on_signal

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of the worker."""
    end_on_signal()
    from sqla_jobs.worker.options import add_options as add

    add(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run a worker; the exit code."""
    from sqla_jobs.worker.program import run as run_worker

    return run_worker(arguments)
