"""Break the lines that keep the guarantees, one at a time, and see a test go red for each.

usage: python tests/mutants/run.py [WORD ...]     (only mutants whose name or file contains a word)

Works in copies of the tree, never in it. Before the first mutant the same tests must be green. A mutant is
turned red when a test fails by what it sees; one that only breaks an import, a name, or the text of a
statement proves nothing and counts as broken. Ends with "N of N turned red", and with 1 if that is not so.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from mutants.table import MUTANTS, Mutant  # noqa: E402

AT_ONCE = 2
HANGS = 900  # seconds
#: The statement could not run at all: class 42 of SQLSTATE, under psycopg's names, and SQLAlchemy's refusals.
NO_STATEMENT = re.compile(
    r"\b(?:psycopg\.errors\.(?:SyntaxError|Undefined\w+|Ambiguous\w+|Duplicate(?:Column|Alias)|GroupingError"
    r"|DatatypeMismatch|CannotCoerce|IndeterminateDatatype|InvalidColumnReference|WrongObjectType)"
    r"|sqlalchemy\.exc\.(?:CompileError|ArgumentError|NoSuchColumnError|StatementError))"
)
#: The code could not run: these, raised by a line of ours.
NO_CODE = re.compile(
    r"^sqla_jobs/\S+:\d+: (?:\w*SyntaxError|IndentationError|\w*ImportError|ModuleNotFoundError|NameError"
    r"|UnboundLocalError|AttributeError|TypeError|KeyError)$",
    re.MULTILINE,
)
NOT_A_TEST = re.compile(r"errors? during collection|^_+ ERROR (?:at setup of|collecting) ", re.MULTILINE)
SUMMARY = re.compile(r"^(?:FAILED|ERROR) (.+)$", re.MULTILINE)


class Tried(NamedTuple):
    """What became of one mutant: red, SURVIVED or BROKEN; and which test saw what."""

    mutant: Mutant
    result: str
    seen: str = ""


def copy_of_the_tree(target: Path) -> Path:
    """Everything that the tests need, without what they make."""
    for name in ("sqla_jobs", "tests", "alembic_templates", "docs", "examples"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, target / name)
    return target


def run_tests(tree: Path, tests: tuple[str, ...], *, first: bool) -> tuple[int, str]:
    """pytest's exit code and output, in this copy."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=90", *tests]
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "COLUMNS": "300",  # of the summary's lines
    }
    done = subprocess.run(
        [*command, "-x"] if first else command,
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@contextmanager
def broken(mutant: Mutant, tree: Path) -> Iterator[None]:
    """The copy with this one line changed."""
    path = tree / mutant.file
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(whole, encoding="utf-8")


def tried(mutant: Mutant, trees: "SimpleQueue[Path]") -> Tried:
    """Break, test, mend."""
    tree = trees.get()
    try:
        found = (tree / mutant.file).read_text(encoding="utf-8").count(mutant.old)
        if found != 1:
            return Tried(mutant, "BROKEN", f"its text occurs {found} times in {mutant.file}")
        with broken(mutant, tree):
            code, output = run_tests(tree, mutant.tests, first=True)
    except subprocess.TimeoutExpired:
        return Tried(mutant, "red", "(the tests hang)")
    finally:
        trees.put(tree)
    return judged(mutant, code, output)


def judged(mutant: Mutant, code: int, output: str) -> Tried:
    """Red only by what a test saw: not by code, or a statement, that cannot run."""
    if code == 0:
        return Tried(mutant, "SURVIVED")
    failed = SUMMARY.search(output)
    seen = failed[1].partition("::")[2] if failed else output[-300:]
    for sign, text in ((NOT_A_TEST, output), (NO_CODE, output), (NO_STATEMENT, seen)):
        if (found := sign.search(text)) is not None:
            return Tried(mutant, "BROKEN", f"{found[0].strip()}: {seen}")
    # pytest ends with 1 when tests failed, and with more when it could not run them
    return Tried(mutant, "red" if failed and code == 1 else "BROKEN", seen)


def main(words: list[str]) -> int:
    """Try them all; the exit code."""
    chosen = [
        each for each in MUTANTS if not words or any(word in f"{each.name} {each.file}" for word in words)
    ]
    if not chosen:
        print("no mutant has such a word in its name or file")
        return 1
    with tempfile.TemporaryDirectory(prefix="mutants-", dir="/tmp") as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(AT_ONCE):
            trees.put(copy_of_the_tree(Path(folder) / str(number)))
        tests = tuple(sorted({test for each in chosen for test in each.tests}))
        tree = trees.get()
        code, output = run_tests(tree, tests, first=False)
        trees.put(tree)
        if code:
            print(output[-3000:])
            print("the tests are not green without any mutant")
            return 1
        red = 0
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for mutant, result, seen in pool.map(lambda each: tried(each, trees), chosen):
                red += result == "red"
                print(f"{result:8} G{mutant.guarantee} {mutant.name}  {seen[:160]}", flush=True)
    print(f"{red} of {len(chosen)} turned red")
    return 0 if red == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
