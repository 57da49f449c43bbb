"""A database that many tests share, its tables emptied before each: a new one costs ten times as much.

For tests that leave nothing but rows behind. Who alters tables or settings takes a database of their own
(`database_url`, `engine`).
"""

from collections.abc import Iterator

import pytest
from shop import Base
from sqlalchemy import Connection, Engine, create_engine, make_url, text
from steps import autocommit

from sqla_jobs.embedded import EmbeddedPostgres

_EMPTY = text(f"TRUNCATE {', '.join(table.name for table in Base.metadata.sorted_tables)} RESTART IDENTITY")


@pytest.fixture(scope="session")
def _shared_engine(server: EmbeddedPostgres, template: str) -> Iterator[Engine]:
    url = make_url(server.create_database("shared", template=template))
    engine = create_engine(url.set(drivername="postgresql+psycopg"))
    yield engine
    engine.dispose()


@pytest.fixture
def clean(_shared_engine: Engine) -> Engine:
    """An engine on the shared database, whose tables are empty."""
    with _shared_engine.begin() as connection:
        connection.execute(text("SET LOCAL lock_timeout = '10s'"))
        connection.execute(_EMPTY)
    return _shared_engine


@pytest.fixture
def clean_url(clean: Engine) -> str:
    """The same, for a driver's own connection."""
    return clean.url.set(drivername="postgresql").render_as_string(hide_password=False)


@pytest.fixture
def a(clean: Engine) -> Iterator[Connection]:
    """One connection in AUTOCOMMIT: as a rule, worker A's."""
    with autocommit(clean) as connection:
        yield connection


@pytest.fixture
def b(clean: Engine) -> Iterator[Connection]:
    """Another: worker B's, or an observer's."""
    with autocommit(clean) as connection:
        yield connection
