"""`sqla-jobs`: one table of commands; a command's module is imported only when it runs."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NoReturn, Protocol, cast

__all__ = ["COMMANDS", "Command", "main"]


class _Parser(argparse.ArgumentParser):
    """Says in one sentence what is wrong; `--help` shows the rest."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


class _Module(Protocol):
    """What a command's module has."""

    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its name, its one line of help, and the module that has `add_options` and `run`."""

    name: str
    help: str
    module: str

    def load(self) -> _Module:
        """Import its module."""
        return cast("_Module", import_module(self.module))


#: Every command there is; a new one is a line here and a module.
COMMANDS: tuple[Command, ...] = (
    Command("demo", "a small shop on a private PostgreSQL; a worker gets killed", "sqla_jobs.cli.demo"),
    Command("template", "print where the Alembic template lies", "sqla_jobs.cli.template"),
    Command("worker", "run jobs (the same as python -m sqla_jobs.worker)", "sqla_jobs.cli.worker"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code. Ctrl-C is 130, as in a shell, and no traceback."""
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        return 130


def _run(words: list[str]) -> int:
    chosen = {command.name: command for command in COMMANDS}.get(words[0]) if words else None
    if chosen is not None:
        module = chosen.load()
        parser = _Parser(prog=f"sqla-jobs {chosen.name}", description=chosen.help)
        module.add_options(parser)
        return module.run(parser.parse_args(words[1:]))
    overview = _Parser(prog="sqla-jobs", description="Background jobs for SQLAlchemy applications.")
    commands = overview.add_subparsers(metavar="COMMAND", title="commands")
    for command in COMMANDS:
        commands.add_parser(command.name, help=command.help, add_help=False)
    if not words:
        overview.print_help()
        return 2
    overview.parse_args(words)
    return 0
