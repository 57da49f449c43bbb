"""`sqla-jobs worker`: the same program as `python -m sqla_jobs.worker`."""

from sqla_jobs.worker.__main__ import run
from sqla_jobs.worker.options import add_options

__all__ = ["add_options", "run"]
