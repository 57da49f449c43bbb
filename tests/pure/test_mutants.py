"""The table of mutants still fits the code: `make mutants` tries them."""

import re
from collections import Counter
from pathlib import Path

import pytest
from mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]


def exists(test: str) -> bool:
    """Whether this file, or this test of it, is there."""
    file, _, name = test.partition("::")
    path = ROOT / file
    return path.is_file() and (
        not name
        or bool(re.search(rf"^(async )?def {name}\(", path.read_text(encoding="utf-8"), re.MULTILINE))
    )


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_its_text_occurs_once_and_its_tests_exist(mutant: Mutant) -> None:
    whole = (ROOT / mutant.file).read_text(encoding="utf-8")

    assert whole.count(mutant.old) == 1
    assert mutant.new != mutant.old
    compile(whole.replace(mutant.old, mutant.new), mutant.file, "exec")
    assert mutant.tests
    assert [test for test in mutant.tests if not exists(test)] == []


def test_a_test_that_is_not_there_is_noticed() -> None:
    assert exists("tests/pure/test_mutants.py::test_a_test_that_is_not_there_is_noticed")
    assert not exists("tests/pure/test_mutants.py::test_nothing")
    assert not exists("tests/pure/test_nothing.py")


def test_every_guarantee_has_its_mutants_and_no_two_share_a_name() -> None:
    assert sorted({mutant.guarantee for mutant in MUTANTS}) == [1, 2, 3, 4, 5, 6, 7]
    assert [name for name, count in Counter(each.name for each in MUTANTS).items() if count > 1] == []
