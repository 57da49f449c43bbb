"""One private PostgreSQL for the whole run, a fresh database from a template for every test that asks.

Whole folders run in three processes at once, each with a server of its own: most tests wait most of their
time. `-n 0`, a debugger, or naming a file makes it one.

SQLA_JOBS_PG_BIN chooses the binaries; with SQLA_JOBS_REQUIRE_PGBOUNCER a missing pgbouncer fails.
A DATABASE_URL of the environment is never used.
"""

import os
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path

import pytest
from shop import Base
from sqlalchemy import Engine, create_engine, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from sqla_jobs.embedded import EmbeddedPostgres

_numbers = count(1)

_KEPT = {"SQLA_JOBS_PG_BIN", "SQLA_JOBS_REQUIRE_PGBOUNCER"}
for name in [name for name in os.environ if name.startswith("SQLA_JOBS_") and name not in _KEPT]:
    del os.environ[name]
for name in ("DATABASE_URL", "QUEUE_NAME", "WORKER_CONCURRENCY"):
    os.environ.pop(name, None)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Before pytest-xdist looks at its options; where it is not installed, there is one process."""
    option = config.option
    of_files = any(".py" in argument for argument in config.args)
    if hasattr(config, "workerinput") or of_files or option.usepdb or option.collectonly:
        return
    if getattr(option, "numprocesses", 0) is None:
        option.numprocesses, option.dist = 3, "worksteal"


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """psycopg's async connections need asyncio."""
    return "asyncio"


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedPostgres]:
    """The server that tests share; who stops or restarts one starts their own."""
    with EmbeddedPostgres(durable=False) as running:
        yield running


@pytest.fixture(scope="session")
def template(server: EmbeddedPostgres) -> str:
    """A database with every table of the test application, made by create_all."""
    engine = create_engine(_psycopg(server.create_database("template_shop")))
    Base.metadata.create_all(engine)
    engine.dispose()
    return "template_shop"


@pytest.fixture
def database_url(server: EmbeddedPostgres, template: str) -> Iterator[str]:
    """The URL of a database of this test's own, with the tables of the test application."""
    name = f"test_{next(_numbers)}"
    yield server.create_database(name, template=template)
    server.drop_database(name)


@pytest.fixture
def empty_database_url(server: EmbeddedPostgres) -> Iterator[str]:
    """The URL of a database without any table."""
    name = f"empty_{next(_numbers)}"
    yield server.create_database(name)
    server.drop_database(name)


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """A sync engine on the test's database."""
    engine = create_engine(_psycopg(database_url))
    yield engine
    engine.dispose()


@pytest.fixture
async def async_engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    """An async engine on the test's database."""
    engine = create_async_engine(_psycopg(database_url))
    yield engine
    await engine.dispose()


@pytest.fixture
def tests_folder() -> Path:
    """Where shop.py lies, for processes that import it."""
    return Path(__file__).parent


def _psycopg(url: str) -> str:
    return make_url(url).set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
