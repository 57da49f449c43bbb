"""Break the lines that keep the guarantees, one at a time, and see a test go red for each.

usage: python tests/mutants/run.py [WORD ...]     (only mutants whose name or file contains a word)

Works in copies of the tree, never in it. Before the first mutant the same tests must be green. A mutant is
turned red when a test fails by what it asserts; one that only breaks an import or the text of a statement
proves nothing and counts as broken. Ends with "N of N turned red", and with 1 if that is not so.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from mutants.table import MUTANTS, Mutant  # noqa: E402

AT_ONCE = 2
#: What says that the mutant could not even be tried.
BROKEN = re.compile(
    r"errors? during collection|ImportError|SyntaxError|UndefinedColumn|UndefinedTable|UndefinedFunction"
    r"|CompileError|IndentationError"
)


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
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*command, "-x"] if first else command,
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def tried(mutant: Mutant, trees: "SimpleQueue[Path]") -> tuple[Mutant, str, str]:
    """What became of one mutant: red, SURVIVED or BROKEN, and the test that saw it."""
    tree = trees.get()
    path = tree / mutant.file
    whole = path.read_text()
    try:
        if whole.count(mutant.old) != 1:
            return mutant, "BROKEN", f"its text occurs {whole.count(mutant.old)} times in {mutant.file}"
        path.write_text(whole.replace(mutant.old, mutant.new))
        code, output = run_tests(tree, mutant.tests, first=True)
    except subprocess.TimeoutExpired:
        return mutant, "red", "(the tests hang)"
    finally:
        path.write_text(whole)
        trees.put(tree)
    if code == 0:
        return mutant, "SURVIVED", ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    if failed is None or BROKEN.search(output):
        return mutant, "BROKEN", output[-300:]
    return mutant, "red", failed[1].rpartition("::")[2]


def main(words: list[str]) -> int:
    """Try them all; the exit code."""
    chosen = [
        each for each in MUTANTS if not words or any(word in f"{each.name} {each.file}" for word in words)
    ]
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
                print(f"{result:8} G{mutant.guarantee} {mutant.name}  {seen}", flush=True)
    print(f"{red} of {len(chosen)} turned red")
    return 0 if red == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
