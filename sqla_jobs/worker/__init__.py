"""Run jobs: `Worker`, and `python -m sqla_jobs.worker`. Imports neither Alembic nor any extra."""

from sqla_jobs.worker.loop import Worker

__all__ = ["Worker"]
