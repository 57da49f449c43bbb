"""`sqla-jobs template`: where the Alembic template lies, for `alembic init -t "$(sqla-jobs template)" DIR`.

Prints a path. Does not import Alembic, and creates nothing.
"""

import argparse
import sys
from pathlib import Path

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def run(_: argparse.Namespace) -> int:
    """Print the absolute path (`alembic init` finds no relative one); the exit code."""
    package = Path(__file__).resolve().parents[1]
    # In the package: a wheel. Beside it: a checkout, editable or not. Not by a search of sys.path: an
    # editable install leaves a copy in site-packages that nobody refreshes.
    for home in (package, package.parent):
        folder = home / "alembic_templates" / "sqla_jobs"
        if folder.is_dir():
            print(folder)
            return 0
    print(f"no alembic_templates in or beside {package}: reinstall sqla_jobs", file=sys.stderr)
    return 1
