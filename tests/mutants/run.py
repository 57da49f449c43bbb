"""Break the lines that keep the guarantees, one at a time, and see a test go red for each.

usage: python tests/mutants/run.py [WORD ...]     (only mutants whose name or file contains a word)

Works in copies of the tree, never in it. Before the first mutant the same tests must be green; one that
fails among the others and passes alone is named as flaky, and goes on. A mutant is turned red when a test
fails by what it asserts (one of a whole file twice, the second time alone). One that breaks an import,
the text of a statement or a fixture, or that hangs, proves nothing and counts as broken. Ends with "N of N
turned red", and with 1 if that is not so.
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

AT_ONCE = 6  # copies; most tests wait most of their time
HANGS = 900  # seconds
#: The statement could not run at all: class 42 of SQLSTATE, under psycopg's names, and SQLAlchemy's refusals.
NO_STATEMENT = re.compile(
    r"\b(?:psycopg\.errors\.(?:SyntaxError|Undefined(?:Column|Table|Function|Parameter)|Ambiguous\w+|Duplicate(?:Column|Alias)|GroupingError"
    r"|DatatypeMismatch|CannotCoerce|IndeterminateDatatype|InvalidColumnReference|WrongObjectType)"
    r"|sqlalchemy\.exc\.(?:CompileError|ArgumentError|NoSuchColumnError|StatementError))"
)
#: The code could not run: these, raised by a line of ours.
NO_CODE = re.compile(
    r'^  File "\S*/sqla_jobs/\S+", line \d+, in .*\n(?:    .*\n)*'
    r"(?:\w*SyntaxError|IndentationError|\w*ImportError|ModuleNotFoundError|NameError|UnboundLocalError"
    r"|AttributeError|TypeError|KeyError)\b",
    re.MULTILINE,
)
NOT_A_TEST = re.compile(r"errors? during collection|^_+ ERROR (?:at setup of|collecting) ", re.MULTILINE)
#: Without its parameters, which may hold spaces.
FAILED = re.compile(r"^FAILED (\S+::\w+)", re.MULTILINE)

Trees = SimpleQueue[Path]


def copy_of_the_tree(target: Path) -> Path:
    """Everything that the tests need, without what they make."""
    for name in ("sqla_jobs", "tests", "alembic_templates", "docs", "examples"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, target / name)
    # an installed sqla_jobs in its place would let every mutant survive
    where = subprocess.run(
        [sys.executable, "-c", "import sqla_jobs; print(sqla_jobs.__file__)"],
        cwd=target,
        env=environment(target),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert where.startswith(str(target)), where
    return target


def environment(tree: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "300"}


def run_tests(tree: Path, tests: tuple[str, ...], *options: str) -> tuple[int, str]:
    """pytest's exit code and output, in this copy."""
    # --tb=native: the longer forms parse the source, which fails after a mutant's endless recursion
    command = [sys.executable, "-m", "pytest", "-q", "--tb=native", "-p", "no:cacheprovider", "--timeout=90"]
    command += ["-n", "0"]  # several copies are tested at once already
    done = subprocess.run(
        [*command, *options, *tests],
        cwd=tree,
        env=environment(tree),
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def is_green(trees: Trees, tests: tuple[str, ...]) -> bool:
    """Whether these tests pass as the code stands."""
    tree = trees.get()
    try:
        code, output = run_tests(tree, tests)
        failed = tuple(sorted(set(FAILED.findall(output))))
        if code == 1 and failed and not re.search(r"^ERROR ", output, re.MULTILINE):
            print("red without any mutant, once more alone:", *failed, sep="\n  ", flush=True)
            code, output = run_tests(tree, failed)
    finally:
        trees.put(tree)
    if code:
        print(output[-3000:])
    return code == 0


def tried(mutant: Mutant, trees: Trees) -> tuple[Mutant, str, str]:
    """What became of one mutant: red, SURVIVED or BROKEN, and the test that saw it."""
    tree = trees.get()
    path = tree / mutant.file
    whole = path.read_text()
    try:
        if whole.count(mutant.old) != 1:
            return mutant, "BROKEN", f"its text occurs {whole.count(mutant.old)} times in {mutant.file}"
        path.write_text(whole.replace(mutant.old, mutant.new))
        code, output = run_tests(tree, mutant.tests, "-x")
        # of a whole file any test may have failed, also one that has nothing to do with it
        if code == 1 and (seen := FAILED.search(output)) and not all("::" in test for test in mutant.tests):
            again, second = run_tests(tree, (seen[1],))
            if again == 0:
                return mutant, "SURVIVED", f"(but for {seen[1]}, which passes alone)"
            code, output = again, second
    except subprocess.TimeoutExpired:
        return mutant, "BROKEN", "(its tests hang: no test of them says what is wrong)"
    finally:
        path.write_text(whole)
        trees.put(tree)
    return mutant, *judged(code, output)


def judged(code: int, output: str) -> tuple[str, str]:
    """Red only by what a test saw: not by code, or a statement, that cannot run."""
    if code == 0:
        return "SURVIVED", ""
    failed = FAILED.search(output)
    line = output[failed.start() :].partition("\n")[0] if failed else ""
    for sign, text in ((NOT_A_TEST, output), (NO_CODE, output), (NO_STATEMENT, line)):
        if (found := sign.search(text)) is not None:
            return "BROKEN", f"({found[0].strip()[-300:]})"
    if code != 1 or (failed is None and "Timeout" not in output):
        return "BROKEN", f"(pytest ended with {code})\n{output[-600:]}"
    return "red", line.partition("::")[2] or "(the time limit of a test)"


def main(words: list[str]) -> int:
    """Try them all; the exit code."""
    chosen = [
        each for each in MUTANTS if not words or any(word in f"{each.name} {each.file}" for word in words)
    ]
    with tempfile.TemporaryDirectory(prefix="mutants-", dir="/tmp") as folder:
        trees: Trees = SimpleQueue()
        for number in range(AT_ONCE):
            trees.put(copy_of_the_tree(Path(folder) / str(number)))
        tests = sorted({test for each in chosen for test in each.tests})
        # a file that is named whole needs none of its tests named beside it
        tests = [test for test in tests if "::" not in test or test.partition("::")[0] not in tests]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            halves = [tuple(half) for number in range(AT_ONCE) if (half := tests[number::AT_ONCE])]
            if not all(list(pool.map(lambda half: is_green(trees, half), halves))):
                print("the tests are not green without any mutant")
                return 1
            red = 0
            for mutant, result, seen in pool.map(lambda each: tried(each, trees), chosen):
                red += result == "red"
                print(f"{result:8} G{mutant.guarantee} {mutant.name}  {seen[:160]}", flush=True)
    print(f"{red} of {len(chosen)} turned red")
    return 0 if chosen and red == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
