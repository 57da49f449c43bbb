"""Every block of README.md runs: files are written as their first line says, commands as they stand."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from processes import worker_process
from sqlalchemy import Engine, create_engine, make_url
from workers import until_row

from sqla_jobs.embedded import EmbeddedPostgres

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


class Block(NamedTuple):
    """A fenced block: its language, its first line, its text."""

    language: str
    first: str
    text: str


BLOCKS = [
    Block(language, body.partition("\n")[0], body)
    for language, body in re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
]


def block(start: str) -> str:
    """The text of the one block whose first line starts so."""
    [found] = [each.text for each in BLOCKS if each.first.startswith(start)]
    return found


class App:
    """The README's application in a folder of its own, with the interpreter's commands on its PATH."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        commands = Path(sys.executable).parent
        self.environment = {
            "PATH": f"{commands}:/usr/bin:/bin",
            "DATABASE_URL": url,
            "HOME": str(folder),
            "PYTHONPATH": str(folder),
        }
        (folder / "app").mkdir()
        for each in BLOCKS:
            if match := re.fullmatch(r"# (app/\w+\.py)", each.first):
                (folder / match[1]).write_text(each.text, encoding="utf-8")

    def shell(self, command: str) -> str:
        """Run a line of a README's shell block; its output."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def python(self, preamble: str, body: str) -> str:
        """Run a README's snippet as a script; its output."""
        script = self.folder / "snippet.py"
        script.write_text(preamble + body, encoding="utf-8")
        return self.shell(f"{sys.executable} -W error snippet.py")


@pytest.fixture
def app(tmp_path: Path, empty_database_url: str) -> App:
    """On a database without any table."""
    return App(tmp_path, empty_database_url)


@pytest.fixture
def readme_engine(app: App) -> Iterator[Engine]:
    """On the application's database."""
    engine = create_engine(make_url(app.url).set(drivername="postgresql+psycopg"))
    yield engine
    engine.dispose()


REQUEST = """
import os
from datetime import timedelta
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from sqla_jobs import enqueue
from app.models import *
from app.tasks import jobs, send_receipt
engine = create_engine(os.environ["DATABASE_URL"])
"""
ASYNC_REQUEST = """
import asyncio, os
from datetime import timedelta
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqla_jobs import enqueue
from app.models import *
from app.tasks import jobs
from app.more_tasks import remind
engine = create_async_engine(os.environ["DATABASE_URL"])
async def main():
"""


async def test_the_first_screen_from_an_empty_database_to_a_receipt(
    app: App, readme_engine: Engine, server: EmbeddedPostgres, tmp_path: Path
) -> None:
    for line in block("alembic init").splitlines()[:-1]:
        app.shell(line)
    app.python(REQUEST, block("# in a request"))
    app.environment["PYTHONPATH"] = f"{tmp_path}"

    assert (
        block("alembic init").splitlines()[-1].startswith("python -m sqla_jobs.worker --app app.tasks:jobs ")
    )
    with worker_process(app.url, tmp_path / "log", app="app.tasks:jobs", folder=tmp_path) as worker:
        archived = "SELECT status, attempts FROM background_jobs_archive"
        assert await until_row(readme_engine, archived) == ("done", 1)
        server.psql(block("INSERT INTO"), str(readme_engine.url.database))
        await until_row(readme_engine, "SELECT 1 FROM receipts HAVING count(*) = 2")
        assert worker.stop() == 0

    assert worker.text().count("mail to ada@example.org None") == 2


async def test_the_second_screen_async_options_and_looking_a_job_up(
    app: App, readme_engine: Engine, tmp_path: Path
) -> None:
    app.python(REQUEST, "Base.metadata.create_all(engine)\n")
    app.python(REQUEST, block("# in a request"))
    body = "".join(f"    {line}\n" for line in block("# in an async request").splitlines())

    output = app.python(ASYNC_REQUEST, body + "    await engine.dispose()\nasyncio.run(main())\n")

    assert output.splitlines() == ["2", "ready 0 None"]
    with worker_process(app.url, tmp_path / "log", app="app.tasks:jobs", folder=tmp_path) as worker:
        # the receipt, then the reminder: done, or snoozed if it was the first
        await until_row(
            readme_engine, "SELECT 1 FROM background_jobs_archive WHERE kind = 'app.tasks.send_receipt'"
        )
        await until_row(
            readme_engine,
            "SELECT 1 FROM background_jobs_archive WHERE kind = 'app.more_tasks.remind' UNION ALL "
            "SELECT 1 FROM background_jobs WHERE kind = 'app.more_tasks.remind' AND fencing_token = 1 "
            "AND run_at > clock_timestamp() + interval '2 days'",
        )
        assert worker.stop() == 0


def test_the_two_commands_are_what_the_gate_runs() -> None:
    gate = (ROOT / ".ci" / "run").read_text(encoding="utf-8")

    commands = [block("python3 -m venv").strip(), block(".venv/bin/pytest").strip()]

    assert commands == [
        "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/sqla-jobs demo",
        ".venv/bin/pytest",
    ]
    for command in commands:
        assert command in gate


def test_every_block_is_run_by_a_test() -> None:
    files = {first for _, first, _ in BLOCKS if first.startswith("# app/")}
    others = [first for _, first, _ in BLOCKS if first not in files]

    assert files == {"# app/models.py", "# app/tasks.py", "# app/more_tasks.py"}
    assert len(others) == 6  # two commands, two requests, the alembic block, the INSERT: all named above


def test_the_first_screen_fits_and_the_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert len(README.splitlines()) <= 150
    assert "Python 3.11+" in README
    assert project["requires-python"] == ">=3.11"
    assert os.path.isfile(ROOT / "CHANGELOG.md")


def test_every_link_of_the_readme_leads_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)

    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []
