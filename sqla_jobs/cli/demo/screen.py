"""What the demo shows: lines of a story, how far it is, and a table. With rich on a terminal, else plain.

rich is imported when it is used, and nothing is missing without it but colour and bars.
"""

import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from sqla_jobs.cli.demo.checks import Check

__all__ = ["PlainScreen", "RichScreen", "Screen", "choose_screen"]

_WIDEST = 100
_EVERY = 2.0  # seconds between two plain lines of progress


class Screen(Protocol):
    """Where the story is told."""

    def say(self, text: str) -> None:
        """A sentence of the story, with the seconds since the start."""

    def progress(self, *, written: int, orders: int, receipts: int, expected: int) -> None:
        """How far it is; cheap, may be called often."""

    def table(self, checks: Sequence[Check]) -> None:
        """The outcome, line by line."""

    def close(self) -> None:
        """Leave the terminal as it was."""


def choose_screen() -> Screen:
    """Bars for a terminal that can show them, lines for everything else."""
    if sys.stdout.isatty():
        with suppress(ImportError):
            screen = RichScreen()
            if screen.can_draw:
                return screen
    return PlainScreen()


def _sentence(started: float, text: str) -> str:
    """`  3.4 s  text`, wrapped under itself."""
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    return textwrap.fill(
        text,
        max(width, 40),
        initial_indent=f"{time.monotonic() - started:5.1f} s  ",
        subsequent_indent=" " * 9,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _number(value: int | str) -> str:
    return f"{value:,}" if isinstance(value, int) else value


def _remark(check: Check) -> str:
    return "; ".join(each for each in (check.problem, check.note) if each)


class PlainScreen:
    """Lines of text: for logs, pipes, and terminals without rich."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._told = (0.0, "")

    def say(self, text: str) -> None:
        """A sentence of the story."""
        self._print(_sentence(self._started, text))

    def progress(self, *, written: int, orders: int, receipts: int, expected: int) -> None:
        """A line now and then, and one when everything is there."""
        at, before = self._told
        text = f"orders {written:,} of {orders:,}, receipts {receipts:,} of {expected:,}"
        complete = written == orders and receipts == expected
        if text != before and (complete or time.monotonic() - at >= _EVERY):
            self._told = time.monotonic(), text
            self._print(_sentence(self._started, text))

    def table(self, checks: Sequence[Check]) -> None:
        """One line for each check; `FAILED` can be searched for."""
        self._print(f"\n          {'what must hold':44}{'expected':>9}{'found':>9}")
        for check in checks:
            verdict = "ok" if check.ok else "FAILED"
            found = f"{_number(check.expected):>9}{_number(check.found):>9}"
            line = f"  {verdict:8}{check.name:44}{found}  {_remark(check)}"
            self._print(line.rstrip())

    def close(self) -> None:
        """Nothing to put back."""

    def _print(self, text: str) -> None:
        print(text, flush=True)


class RichScreen:
    """Colour and two bars. Raises ImportError when rich is missing."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._started = time.monotonic()
        self._console = Console(highlight=False)
        columns = TextColumn("         {task.description:9}"), BarColumn(40), MofNCompleteColumn()
        self._progress: Any = Progress(*columns, console=self._console)
        self._bars: dict[str, Any] = {}

    @property
    def can_draw(self) -> bool:
        """Not under TERM=dumb."""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def say(self, text: str) -> None:
        """A sentence of the story, above the bars."""
        from rich.text import Text

        sentence = Text(_sentence(self._started, text))
        sentence.stylize("dim", 0, 9)
        self._console.print(sentence)

    def progress(self, *, written: int, orders: int, receipts: int, expected: int) -> None:
        """Move the bars."""
        if not self._bars:
            self._progress.start()
        for name, done, total in ("orders", written, orders), ("receipts", receipts, expected):
            if name not in self._bars:
                self._bars[name] = self._progress.add_task(name, total=total)
            self._progress.update(self._bars[name], completed=done)

    def table(self, checks: Sequence[Check]) -> None:
        """The bars stay where they are; the table comes below."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        self.close()
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("")
        table.add_column("what must hold", min_width=44, overflow="fold")
        table.add_column("expected", justify="right")
        table.add_column("found", justify="right")
        for check in checks:
            verdict = Text("ok", "green") if check.ok else Text("FAILED", "bold red")
            numbers = (Text(_number(each)) for each in (check.expected, check.found))
            name = Text(check.name)
            if _remark(check):
                name.append(f"\n  {_remark(check)}", "dim" if check.ok else "red")
            table.add_row(verdict, name, *numbers)
        self._console.print(table)

    def close(self) -> None:
        """Stop drawing, show the cursor again."""
        self._progress.stop()
