"""Run jobs: `Worker`, and `python -m sqla_jobs.worker`. Imports neither Alembic nor any extra."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqla_jobs.worker.loop import Worker

__all__ = ["Worker"]


def __getattr__(name: str) -> Any:
    """`Worker`, when it is asked for: the program below this package must get to its first line soon."""
    if name != "Worker":
        raise AttributeError(f"module 'sqla_jobs.worker' has no attribute {name!r}")
    from sqla_jobs.worker.loop import Worker

    globals()[name] = Worker
    return Worker
