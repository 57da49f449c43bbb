"""tests/README.md names tests that exist, and every test that bears a case's number is in it."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def defined() -> set[str]:
    """Every test there is."""
    return {
        name
        for path in TESTS.glob("*/test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }


def table() -> dict[str, set[str]]:
    """Case -> tests."""
    found = {}
    for line in (TESTS / "README.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| B"):
            cases, _, tests = line.strip("| ").split(" | ")
            for case in cases.split(", "):
                found[case] = set(re.findall(r"`(test_\w+)`", tests))
    return found


def test_every_test_that_the_table_of_field_cases_names_exists() -> None:
    assert len(table()) > 30
    for case, tests in table().items():
        assert tests, case
        assert tests <= defined(), case


def test_every_case_with_a_test_of_its_number_is_in_the_table() -> None:
    numbered = {f"B{number}" for name in defined() for number in re.findall(r"(?<=_b)\d\d(?=_)", name)}

    assert numbered <= set(table())
