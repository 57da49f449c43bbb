"""The table of mutants still fits the code: `make mutants` tries them."""

from collections import Counter
from pathlib import Path

import pytest
from mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_its_text_occurs_once_and_its_tests_exist(mutant: Mutant) -> None:
    whole = (ROOT / mutant.file).read_text(encoding="utf-8")

    assert whole.count(mutant.old) == 1
    assert mutant.new not in ("", mutant.old) or mutant.new == ""
    compile(whole.replace(mutant.old, mutant.new), mutant.file, "exec")
    assert [test for test in mutant.tests if not (ROOT / test).is_file()] == []


def test_every_guarantee_has_its_mutants_and_no_two_share_a_name() -> None:
    assert sorted({mutant.guarantee for mutant in MUTANTS}) == [1, 2, 3, 4, 5, 6, 7]
    assert [name for name, count in Counter(each.name for each in MUTANTS).items() if count > 1] == []
