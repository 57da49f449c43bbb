"""The reference pages say what the code says."""

import argparse
import re
from datetime import timedelta
from pathlib import Path

import pytest

from sqla_jobs.events import EVENTS
from sqla_jobs.worker import program
from sqla_jobs.worker.options import OPTIONS, Parser, add_options

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "worker.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    body = PAGE.partition(heading)[2]
    found = re.search(r"^\|.*?(?=\n\n|\Z)", body, re.MULTILINE | re.DOTALL)
    assert found is not None, heading
    lines = found[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def flags(cell: str) -> set[str]:
    """`-q`, `--queue NAME` -> {-q, --queue}."""
    return set(re.findall(r"--?[a-z][a-z-]*", cell))


def test_every_option_is_in_the_table_with_its_variables_and_its_default() -> None:
    shown = {max(flags(row[0]), key=len): row for row in table("# The worker")}

    for option in OPTIONS:
        row = shown.pop(option.flags[-1])
        assert flags(row[0]) == set(option.flags)
        assert re.findall(r"[A-Z_]{3,}", row[1]) == list(option.variables)
        default = option.default
        if isinstance(default, timedelta):
            default = f"{default.total_seconds():g}s"
        assert row[2] == ("" if default is None else str(default)), option.flags
    assert set(shown) == {"--no-listen", "--check"}


def test_the_parser_knows_nothing_that_the_table_does_not_show() -> None:
    parser = Parser(prog="worker")
    add_options(parser)

    known = {flag for action in parser._actions for flag in action.option_strings} - {"-h", "--help"}

    assert known == {flag for row in table("# The worker") for flag in flags(row[0])}


def test_every_event_is_in_the_table_with_its_fields() -> None:
    shown = {row[0].strip("`"): tuple(re.findall(r"`(\w+)`", row[1])) for row in table("## Events")}

    assert shown == dict(EVENTS)


def test_every_exit_code_is_in_the_table() -> None:
    assert program.__doc__ is not None
    documented = {int(code) for code in re.findall(r"\b(\d) [a-z]", program.__doc__)}

    assert {int(row[0]) for row in table("## Exit codes")} == documented == set(range(8))


@pytest.mark.parametrize("argument", ["--lease=soon", "--max-memory=lots", "--mode=ever", "--bogus"])
def test_a_usage_error_is_one_sentence_and_exit_code_2(
    argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser: argparse.ArgumentParser = Parser(prog="worker")
    add_options(parser)

    with pytest.raises(SystemExit) as ended:
        parser.parse_args([argument])

    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
