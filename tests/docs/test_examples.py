"""Every example runs, checks its own result, and exits with 0; so do the tests of an example's own.

Run as a reader does who has copied a folder: from there, with nothing of this checkout on the path but what
the environment already has.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted([*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*/run.py")])
TESTS = sorted(EXAMPLES.glob("*/test_*.py"))
PYTHON = [sys.executable, "-X", "dev", "-W", "error"]


def named(path: Path) -> str:
    return str(path.relative_to(EXAMPLES))


def copy_of(example: Path, place: Path) -> Path:
    """The script in a copy of its folder (a script at the top: alone)."""
    if example.parent == EXAMPLES:
        return Path(shutil.copy(example, place))
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    return Path(shutil.copytree(example.parent, place / example.parent.name, ignore=ignored)) / example.name


def run(*command: str | Path, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*PYTHON, *command],
        cwd=folder,
        # the copy must be left as it was; and a reader's own setting must lead nowhere
        env=os.environ
        | {"PYTHONDONTWRITEBYTECODE": "1", "DATABASE_URL": "postgresql://nobody@127.0.0.1:1/no"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


@pytest.mark.parametrize("example", SCRIPTS, ids=named)
def test_an_example_runs_and_its_result_is_right(example: Path, tmp_path: Path) -> None:
    script = copy_of(example, tmp_path)
    files = sorted(tmp_path.rglob("*"))

    done = run(script, folder=Path("/"))

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
    assert sorted(tmp_path.rglob("*")) == files


@pytest.mark.parametrize("tests", TESTS, ids=named)
def test_the_tests_of_an_example_pass(tests: Path, tmp_path: Path) -> None:
    copy = copy_of(tests, tmp_path)

    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", folder=copy.parent)

    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*/run.py")), ids=named)
def test_an_interrupted_example_leaves_no_process_and_no_file(example: Path, tmp_path: Path) -> None:
    place = tmp_path / "tmp"  # short, or the server's socket goes to /tmp
    place.mkdir()
    # not under -W error: the signal may fall into a request, whose socket then complains of not being closed
    command = [sys.executable, str(copy_of(example, tmp_path))]
    settings = os.environ | {"TMPDIR": str(place), "MARK_OF_THIS_TEST": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=settings) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"ok")  # the first request is answered, a worker runs

        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=60)

    assert (process.returncode, complaint) == (130, b"")
    assert marked(str(tmp_path)) == []
    assert list(place.iterdir()) == []


def test_every_example_is_listed_and_described() -> None:
    folders = {path.parent for path in EXAMPLES.glob("*/run.py")}
    listed = re.findall(
        r"^- \[`([\w/.]+)`\]\(([\w/.]+)\): ", (EXAMPLES / "README.md").read_text(), re.MULTILINE
    )

    assert {EXAMPLES / target for _, target in listed} == folders | set(EXAMPLES.glob("*.py"))
    assert [folder for folder in folders if not (folder / "README.md").is_file()] == []


def marked(mark: str) -> list[str]:
    """The processes that were started below the one with this mark in its environment."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"MARK_OF_THIS_TEST={mark}".encode() in environment.read_bytes().split(b"\0"):
                found.append(environment.parent.name)
        except OSError:  # gone, or somebody else's
            continue
    return found
