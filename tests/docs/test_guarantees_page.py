"""Every test that the page of guarantees names is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
NAMED = re.findall(r"^- `(tests/\S+)::(\w+)`$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_a_named_test_exists(file: str, test: str) -> None:
    assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)


def test_each_of_the_seven_names_tests() -> None:
    parts = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:8]

    assert [part[0] for part in parts] == list("1234567")
    assert all("- `tests/" in part for part in parts)
