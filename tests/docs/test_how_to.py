"""Every block of docs/how-to/ runs: in its place in an application of which the pages show the parts.

What a page leaves to the reader (imports, the rest of a model, how the framework is started) is written
here, and nothing else: a block is never changed.
"""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent

import pytest
from processes import worker_process
from sqlalchemy import Engine, create_engine, make_url
from workers import rows, until_row

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "how-to").glob("*.md"))

MODELS = """
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqla_jobs import JobMixin
class Base(DeclarativeBase):
    pass
"""
USER = """
class User(%s):
    __tablename__ = "users"
    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str]
    greeted: Mapped[bool] = mapped_column(default=False)
"""


def blocks(page: str) -> dict[str, str]:
    """The page's blocks by their first line; a shell block by its first word."""
    text = (DOCS / "how-to" / page).read_text(encoding="utf-8")
    found = re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return {
        body.split()[0] if language == "bash" else body.partition("\n")[0]: body for language, body in found
    }


class App:
    """An application in a folder of its own, on a database without tables."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self.environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "DATABASE_URL": url,
            "HOME": str(folder),
            "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        (folder / "app").mkdir()

    def write(self, **files: str) -> None:
        """Modules of the package app."""
        for name, text in files.items():
            (self.folder / "app" / f"{name}.py").write_text(text, encoding="utf-8")

    def shell(self, command: str) -> str:
        """Run it; what it said."""
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

    def python(self, script: str) -> str:
        (self.folder / "script.py").write_text(script, encoding="utf-8")
        return self.shell(f"{sys.executable} -X dev -W error script.py")

    @contextlib.contextmanager
    def worker(self, app: str) -> Iterator[None]:
        """A worker as the page starts it, which must end well."""
        log = self.folder / "log"
        with worker_process(self.url, log, app=app, folder=self.folder) as worker:
            yield
            assert worker.stop() == 0, worker.text()


@pytest.fixture
def app(tmp_path: Path, empty_database_url: str) -> App:
    return App(tmp_path, empty_database_url)


@pytest.fixture
def app_engine(app: App) -> Iterator[Engine]:
    engine = create_engine(make_url(app.url).set(drivername="postgresql+psycopg"))
    yield engine
    engine.dispose()


def migrated(app: App, block: str) -> str:
    """Run a page's line for Alembic as it stands; what its line for the worker names with --app."""
    migrate, worker = block.splitlines()
    app.shell('alembic init -t "$(sqla-jobs template)" migrations')
    app.shell(migrate)
    command, _, _ = worker.partition("  #")
    program, name = command.rsplit(" ", 1)
    assert program == "python -m sqla_jobs.worker --app"
    return name


# -- Flask


FLASK_MODELS = MODELS + "from flask_sqlalchemy import SQLAlchemy\ndb = SQLAlchemy(model_class=Base)\n"
FLASK_APP = """
import os
from flask import Flask, request
from sqla_jobs import enqueue
from app.models import *
from app.tasks import greet
def create_app():
    app = Flask("app", template_folder=os.getcwd())
    app.config["SQLALCHEMY_DATABASE_URI"] = os.environ["DATABASE_URL"]
    db.init_app(app)
    @app.post("/users")
    def sign_up():
"""
FLASK_TASKS = """
import os
from flask import render_template
from sqla_jobs import JobContext, Jobs
from app.models import *
def send_mail(address, text):
    db.session.add(User(email=f"{address} got {text}"))
"""
FLASK_WORKER = """
from collections.abc import Iterator
from contextlib import contextmanager
from sqla_jobs import JobContext
from app import create_app
from app.models import db
from app.tasks import jobs
"""
FLASK_CLIENT = """
from app import create_app
from app.models import db
app = create_app()
print(app.test_client().post("/users", data={"email": "ada"}).status_code)
with app.app_context():
    db.engine.dispose()
"""


async def test_the_flask_page(app: App, app_engine: Engine) -> None:
    page = blocks("flask.md")
    files = {"# app/models.py", "# app/tasks.py", "# app/worker.py"}
    view = indent(page["# in a view"], " " * 8) + '        return ""\n    return app\n'
    app.write(
        __init__=FLASK_APP + view,
        models=FLASK_MODELS + page["# app/models.py"] + USER % "db.Model",
        tasks=FLASK_TASKS + page["# app/tasks.py"],
        worker=FLASK_WORKER + page["# app/worker.py"],
    )
    (app.folder / "greeting.txt").write_text("hello {{ user.email }}")
    name = migrated(app, page["alembic"])

    answer = app.python(FLASK_CLIENT)
    with app.worker(name):
        status = await until_row(app_engine, "SELECT status, attempts FROM background_jobs_archive")

    assert page.keys() == files | {"# in a view", "alembic"}
    assert (answer, status) == ("200\n", ("done", 1))
    # the second row went through db.session: it is there because that was the job's session
    assert rows(app_engine, "SELECT email, greeted FROM users ORDER BY id") == [
        ("ada", True),
        ("ada got hello ada", False),
    ]


# -- FastAPI


FASTAPI_TASKS = """
from sqla_jobs import AsyncJobContext, Jobs
from app.models import *
async def send_mail(address, text):
    print(address, text)
"""
FASTAPI_DATABASE = """
import os
from collections.abc import AsyncIterator
from typing import Annotated
from fastapi import Depends
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
engine = create_async_engine(os.environ["DATABASE_URL"])
"""
FASTAPI_MAIN = """
import asyncio, os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from fastapi import FastAPI
from sqla_jobs import Worker, enqueue
from sqla_jobs.telemetry.logs import log_events
from app.database import DbSession, engine
from app.models import User
from app.tasks import greet, jobs
"""
FASTAPI_CLIENT = """
import asyncio
from httpx import ASGITransport, AsyncClient
from app.main import app, engine, %s
async def main():
    async with %s(app), AsyncClient(transport=ASGITransport(app), base_url="http://app") as client:
        answer = await client.post("/users", params={"email": "ada"})
        print(answer.status_code, answer.json())
        %s
    await engine.dispose()
asyncio.run(main())
"""
UNTIL_DONE = """
        from sqlalchemy import text
        while True:
            async with engine.connect() as connection:
                if await connection.scalar(text("SELECT count(*) FROM background_jobs_archive")):
                    break
            await asyncio.sleep(0.02)
"""


@pytest.fixture
def fastapi_page(app: App) -> dict[str, str]:
    page = blocks("fastapi.md")
    route = 'app = FastAPI(lifespan=lifespan)\n@app.post("/users")\n' + page["# in a route"]
    app.write(
        __init__="",
        models=MODELS + 'class Job(JobMixin, Base):\n    __tablename__ = "background_jobs"\n' + USER % "Base",
        tasks=FASTAPI_TASKS + page["# app/tasks.py"],
        database=FASTAPI_DATABASE + page["# app/database.py"],
        main=FASTAPI_MAIN + page["# app/main.py"] + route,
    )
    return page


async def test_the_fastapi_page(app: App, app_engine: Engine, fastapi_page: dict[str, str]) -> None:
    name = migrated(app, fastapi_page["alembic"])
    nothing = "contextlib.nullcontext"

    answer = app.python("import contextlib\n" + FASTAPI_CLIENT % ("jobs", f"{nothing}", "pass"))
    before = rows(app_engine, "SELECT greeted FROM users")
    with app.worker(name):
        status = await until_row(app_engine, "SELECT status, attempts FROM background_jobs_archive")

    files = {"# app/tasks.py", "# app/database.py", "# app/main.py"}
    assert fastapi_page.keys() == files | {"# in a route", "alembic"}
    assert answer == "200 {'user': 1, 'job': 1}\n"
    assert (before, status) == ([(False,)], ("done", 1))
    assert rows(app_engine, "SELECT greeted FROM users") == [(True,)]


def test_the_fastapi_pages_worker_in_the_web_process(
    app: App, app_engine: Engine, fastapi_page: dict[str, str]
) -> None:
    migrated(app, fastapi_page["alembic"])

    output = app.python(FASTAPI_CLIENT % ("lifespan", "lifespan", UNTIL_DONE))

    assert output == "200 {'user': 1, 'job': 1}\nada welcome\n"
    assert rows(app_engine, "SELECT greeted FROM users") == [(True,)]
    assert rows(app_engine, "SELECT status FROM background_jobs_archive") == [("done",)]


def test_the_fastapi_pages_application_does_not_start_without_our_tables(
    app: App, fastapi_page: dict[str, str]
) -> None:
    assert fastapi_page

    with pytest.raises(AssertionError, match='SchemaMismatch: there is no table "background_jobs"'):
        app.python(FASTAPI_CLIENT % ("lifespan", "lifespan", "pass"))


# -- all pages


def test_every_page_is_tested_linked_and_short() -> None:
    linked = re.findall(r"\]\(([^)#]+)\)", (DOCS / "README.md").read_text(encoding="utf-8"))

    assert [page.name for page in PAGES] == [  # a new page needs a test: above, or in test_enqueue_page.py
        "enqueue.md",
        "fastapi.md",
        "flask.md",
    ]
    assert {f"how-to/{page.name}" for page in PAGES} <= set(linked)
    assert [page.name for page in PAGES if len(page.read_text(encoding="utf-8").splitlines()) > 60] == []


@pytest.mark.parametrize("page", [DOCS / "README.md", *PAGES], ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))

    assert targets
    assert [target for target in targets if not (page.parent / target).exists()] == []
