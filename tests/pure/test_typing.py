"""What the type checkers of our users say: nothing about right calls, something about each wrong one.

mypy and pyright run once each, side by side, on copies outside the checkout: as a user's project sees us.
"""

import importlib.util
import json
import re
import subprocess
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path

import pytest

# `pip install .[test]` brings no type checkers; `make venv` does, and so does the gate
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mypy") is None or importlib.util.find_spec("pyright") is None,
    reason="needs mypy and pyright: make venv",
)

FOLDER = Path(__file__).parent.parent / "typing"
LIMIT = 110.0  # seconds; with a warm cache both need about five

Errors = dict[str, dict[int, str]]  # file name -> line -> message


@dataclass
class Checked:
    """The errors of one checker, and how many files it looked at."""

    errors: Errors
    files: int


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> dict[str, Checked]:
    """Both checkers' reports."""
    project = tmp_path_factory.mktemp("project")
    calls, wrong = (FOLDER.joinpath(name).read_text() for name in ("calls.py", "wrong_calls.py"))
    first, _, rest = wrong.partition("\n")
    assert first.startswith("# type: ignore")
    project.joinpath("calls.py").write_text(calls)
    project.joinpath("wrong_calls.py").write_text(f"#\n{rest}")
    settings = {"include": ["."], "pythonVersion": "3.11", "typeCheckingMode": "standard"}
    project.joinpath("pyrightconfig.json").write_text(json.dumps(settings))
    cache = pytestconfig.rootpath / ".mypy_cache" / "users"
    bin_ = Path(sys.executable).parent
    mypy = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--python-version=3.11"]
    mypy += [f"--cache-dir={cache}", "--output=json", "calls.py", "wrong_calls.py"]
    pyright = [str(bin_ / "pyright"), f"--pythonpath={sys.executable}", "--outputjson"]

    running = [
        subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in (mypy, pyright)
    ]
    try:
        mypy_out, pyright_out = (process.communicate(timeout=LIMIT) for process in running)
    finally:
        for process in running:
            process.kill()
            process.communicate()

    return {"mypy": _of_mypy(*mypy_out), "pyright": _of_pyright(*pyright_out)}


def _of_mypy(stdout: str, stderr: str) -> Checked:
    assert stderr == ""
    errors: Errors = {}
    for line in stdout.splitlines():
        found = json.loads(line)
        if found["severity"] == "error":
            errors.setdefault(found["file"], {})[found["line"]] = found["message"]
    return Checked(errors, 2)


def _of_pyright(stdout: str, stderr: str) -> Checked:
    report = json.loads(stdout or "{}")
    assert "summary" in report, stdout + stderr
    errors: Errors = {}
    for found in report["generalDiagnostics"]:
        if found["severity"] == "error":
            name = Path(found["file"]).name
            errors.setdefault(name, {})[found["range"]["start"]["line"] + 1] = found["message"]
    return Checked(errors, report["summary"]["filesAnalyzed"])


def _marked() -> dict[int, str]:
    """The lines that are to have an error, by their comments."""
    with FOLDER.joinpath("wrong_calls.py").open("rb") as file:
        comments = [token for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]
    found = ((comment.start[0], re.match(r"# error: (.+)", comment.string)) for comment in comments)
    return {line: match[1] for line, match in found if match}


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_type_checker_has_nothing_to_say_about_right_calls(
    checked: dict[str, Checked], checker: str
) -> None:
    assert checked[checker].files == 2
    assert checked[checker].errors.get("calls.py", {}) == {}


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
@pytest.mark.parametrize(("line", "what"), _marked().items(), ids=_marked().values())
def test_a_type_checker_finds(checked: dict[str, Checked], checker: str, line: int, what: str) -> None:
    assert line in checked[checker].errors["wrong_calls.py"], what


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_type_checker_finds_nothing_in_unmarked_lines(checked: dict[str, Checked], checker: str) -> None:
    found = checked[checker].errors["wrong_calls.py"]

    assert {line: message for line, message in found.items() if line not in _marked()} == {}
