"""How Alembic reaches your models and your database."""

import os
from logging.config import fileConfig

from alembic import context
from alembic.util import CommandError
from sqlalchemy import URL, create_engine, make_url
from sqlalchemy.pool import NullPool

from app.models import Base  # <- EDIT THIS LINE: the module of your models, your Job class among them

# All metadata that you use: add sqla_jobs.metadata if you have Jobs() without a Job class of your own.
target_metadata = [Base.metadata]

if context.config.config_file_name is not None:
    fileConfig(context.config.config_file_name, disable_existing_loggers=False)

# Only the schemas that your tables are in, and the default one: what else lives in the database is not ours.
schemas = {table.schema for metadata in target_metadata for table in metadata.tables.values()} | {None}


def include_name(name, type_, parent_names):
    return name in schemas if type_ == "schema" else True


options = {
    "target_metadata": target_metadata,
    "include_schemas": schemas != {None},
    "include_name": include_name,
    "compare_type": True,
    "compare_server_default": True,
}


def database_url() -> URL:
    """DATABASE_URL, else sqlalchemy.url of alembic.ini; with psycopg, also where the application has asyncpg."""
    given = os.environ.get("DATABASE_URL") or context.config.get_main_option("sqlalchemy.url")
    if not given:
        raise CommandError("no database: set DATABASE_URL, or sqlalchemy.url in alembic.ini")
    url = make_url(given)
    if url.drivername in {"postgres", "postgresql", "postgresql+asyncpg"}:
        url = url.set(drivername="postgresql+psycopg")
    return url


if context.is_offline_mode():  # alembic upgrade --sql: text for PostgreSQL, no database needed
    context.configure(
        dialect_name="postgresql", literal_binds=True, dialect_opts={"paramstyle": "named"}, **options
    )
    with context.begin_transaction():
        context.run_migrations()
else:
    with create_engine(database_url(), poolclass=NullPool).connect() as connection:
        context.configure(connection=connection, **options)
        with context.begin_transaction():
            context.run_migrations()
