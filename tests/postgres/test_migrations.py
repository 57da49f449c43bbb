"""The Alembic plugin and template: an application's own history brings everything that `create_all` does."""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import psycopg
import pytest
import shop
import sqlalchemy as sa
from alembic.autogenerate import produce_migrations, render_python_code
from alembic.operations import Operations
from alembic.operations.ops import DowngradeOps, DropTableOp, MigrationScript, UpgradeOps
from alembic.runtime.migration import MigrationContext
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqla_jobs.cli import template
from sqla_jobs.embedded import EmbeddedPostgres
from sqla_jobs.errors import SchemaMismatch
from sqla_jobs.migrations.operations import InstallOp, UninstallOp
from sqla_jobs.models import JobMixin
from sqla_jobs.schema import JOBS_STORAGE

MODELS = """
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqla_jobs import JobMixin


class Base(DeclarativeBase):
    pass


class Job(JobMixin, Base):
    __tablename__ = "background_jobs"


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
"""
#: SQLAlchemy 2.0 knows no storage parameters of a table.
OWN_STORAGE: dict[str, Any] = (
    {} if sa.__version__.startswith("2.0.") else {"postgresql_with": {"fillfactor": "70"}}
)

TABLES = ["background_jobs"] + [
    f"background_jobs_{suffix}"
    for suffix in ("archive", "audit", "dependencies", "queues", "schedules", "workers")
]


def run(*command: str | Path, folder: Path, url: str | None = None) -> subprocess.CompletedProcess[str]:
    """A program, warnings as errors, with this DATABASE_URL or none."""
    environment = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
    environment |= {"PYTHONWARNINGS": "error"} | ({"DATABASE_URL": url} if url else {})
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def alembic(folder: Path, *words: str, url: str | None = None) -> str:
    """The command's output; it must succeed."""
    ran = run(Path(sysconfig.get_path("scripts"), "alembic"), *words, folder=folder, url=url)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def catalogue(server: EmbeddedPostgres, url: str) -> list[str]:
    """What pg_dump says of a database, without Alembic's table and what differs from run to run."""
    options = ["--schema-only", "--no-owner", "--exclude-table=alembic_version"]
    dump = run(server.binaries / "pg_dump", *options, "-d", url, folder=Path("/"))
    assert dump.returncode == 0, dump.stderr
    return [line for line in dump.stdout.splitlines() if line and not re.match(r"--|\\(un)?restrict", line)]


def template_path() -> str:
    with redirect_stdout(StringIO()) as printed:
        assert template.run(argparse.Namespace()) == 0
    return printed.getvalue().strip()


@dataclass
class Project:
    """An application with a migrations folder; `unedited` is what Alembic said before env.py was edited."""

    folder: Path
    unedited: str

    @property
    def migration(self) -> str:
        (file,) = (self.folder / "migrations" / "versions").glob("*.py")
        return file.read_text()


@pytest.fixture(scope="module")
def project(server: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """As a newcomer makes it: init, edit one line, revision --autogenerate on an empty database."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "bookshop").mkdir()
    (folder / "bookshop" / "models.py").write_text(MODELS)
    url = server.create_database("migrations_empty")

    alembic(folder, "init", "-t", template_path(), "migrations")
    unedited = run(Path(sysconfig.get_path("scripts"), "alembic"), "check", folder=folder, url=url)
    env = folder / "migrations" / "env.py"
    env.write_text(env.read_text().replace("from app.models import Base", "from bookshop.models import Base"))
    alembic(folder, "revision", "--autogenerate", "-m", "add background jobs", url=url)
    return Project(folder, unedited.stderr)


@dataclass
class Migrated:
    """A database at the head of the project's history, named migrations_head: a template for others."""

    url: str
    catalogue: list[str]


@pytest.fixture(scope="module")
def migrated(server: EmbeddedPostgres, project: Project) -> Migrated:
    url = server.create_database("migrations_head")
    alembic(project.folder, "upgrade", "head", url=url)
    return Migrated(url, catalogue(server, url))


def test_the_template_as_it_comes_says_which_line_to_edit(project: Project) -> None:
    assert "EDIT THIS LINE" in project.unedited
    assert project.unedited.rstrip().endswith("No module named 'app'")


def test_without_a_database_the_template_says_what_to_set(project: Project) -> None:
    ran = run(Path(sysconfig.get_path("scripts"), "alembic"), "check", folder=project.folder)

    assert ran.returncode != 0
    assert (
        "FAILED: no database: set DATABASE_URL, or sqlalchemy.url in alembic.ini" in ran.stdout + ran.stderr
    )


def test_autogenerate_writes_tables_indexes_and_the_install(project: Project) -> None:
    up, down = project.migration.split("def downgrade")

    assert re.findall(r"create_table\('(\w+)'", up) == [*TABLES, "orders"]
    assert re.findall(r"create_index\('background_jobs_(\w+)_idx'", up) == [
        *("claim", "expiry", "failed", "keyed", "one_per_key", "running", "unique"),
        *("archive_finished", "dependencies_parent"),
    ]
    assert re.findall(r"op\.(\w*sqla_jobs.*)", up) == ["install_sqla_jobs('background_jobs', version=1)"]
    assert up.index("op.install_sqla_jobs") > up.index("op.create_table('orders'")
    assert re.findall(r"op\.(\w*sqla_jobs.*)", down) == ["uninstall_sqla_jobs('background_jobs')"]
    assert down.index("op.uninstall_sqla_jobs") < down.index("op.drop_table('background_jobs')")


def test_the_migration_sets_the_storage_parameters(migrated: Migrated) -> None:
    options = "SELECT reloptions FROM pg_class WHERE relname = 'background_jobs'"

    engine = sa.create_engine(sa.make_url(migrated.url).set(drivername="postgresql+psycopg"))
    with engine.connect() as connection:
        set_ = connection.scalar(sa.text(options))
    engine.dispose()

    assert set_ == [f"{name}={value}" for name, value in JOBS_STORAGE.items()]


def test_after_the_upgrade_nothing_is_left_to_migrate(
    project: Project, migrated: Migrated, tmp_path: Path
) -> None:
    folder = shutil.copytree(project.folder, tmp_path / "copy")

    checked = alembic(folder, "check", url=migrated.url)
    alembic(folder, "revision", "--autogenerate", "-m", "second", url=migrated.url)

    assert "No new upgrade operations detected" in checked
    (second,) = (folder / "migrations" / "versions").glob("*_second.py")
    assert re.findall(r"^    \w.*", second.read_text(), re.MULTILINE) == ["    pass", "    pass"]


def test_the_history_and_create_all_give_the_same_catalogue(
    server: EmbeddedPostgres, project: Project, migrated: Migrated, empty_database_url: str
) -> None:
    program = (
        "import os, sqlalchemy, bookshop.models as m;"
        "m.Base.metadata.create_all(e := sqlalchemy.create_engine("
        "os.environ['DATABASE_URL'].replace('postgresql:', 'postgresql+psycopg:'))); e.dispose()"
    )
    created = run(sys.executable, "-c", program, folder=project.folder, url=empty_database_url)

    assert created.returncode == 0, created.stderr
    assert migrated.catalogue == catalogue(server, empty_database_url)
    assert sum(line.startswith("CREATE TABLE") for line in migrated.catalogue) == 8


def test_the_history_as_sql_text_gives_the_same_catalogue(
    server: EmbeddedPostgres, project: Project, migrated: Migrated, empty_database_url: str
) -> None:
    script = alembic(project.folder, "upgrade", "head", "--sql")  # and needs no database

    server.psql(script, sa.make_url(empty_database_url).database or "")

    assert catalogue(server, empty_database_url) == migrated.catalogue


def test_an_insert_by_psql_into_the_migrated_database_wakes_a_listener(
    server: EmbeddedPostgres, migrated: Migrated
) -> None:
    database = server.create_database("migrations_listen", template="migrations_head")
    with psycopg.connect(database, autocommit=True) as connection:
        (oid,) = connection.execute("SELECT 'background_jobs'::regclass::oid").fetchone() or [None]
        connection.execute(f"LISTEN sqla_jobs_{oid}".encode())

        server.psql("INSERT INTO background_jobs (kind) VALUES ('from psql')", "migrations_listen")

        heard = [notify.payload for notify in connection.notifies(timeout=10, stop_after=1)]
        assert [re.sub(r"\d{9,}\.\d", "TIME", payload) for payload in heard] == ["0 TIME default"]


def test_downgrade_leaves_nothing_of_ours_and_upgrade_brings_it_back(
    server: EmbeddedPostgres, project: Project, migrated: Migrated
) -> None:
    url = server.create_database("migrations_down", template="migrations_head")

    alembic(project.folder, "downgrade", "base", url=url)
    left = [line for line in catalogue(server, url) if line.startswith(("CREATE", "COMMENT"))]
    alembic(project.folder, "upgrade", "head", url=url)

    assert [line for line in left if not re.search(r"SCHEMA public", line)] == []
    assert catalogue(server, url) == migrated.catalogue


# -- the plugin by itself, in this process -------------------------------------------------------------


@pytest.fixture
def connection(sa_url: str) -> Iterator[sa.Connection]:
    engine = sa.create_engine(sa_url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        yield connection


@pytest.fixture
def sa_url(request: pytest.FixtureRequest) -> str:
    """The shop's database, unless the test asks for an empty one."""
    wants_empty = "empty_database_url" in request.fixturenames
    url: str = request.getfixturevalue("empty_database_url" if wants_empty else "database_url")
    return url.replace("postgresql://", "postgresql+psycopg://")


def compared(connection: sa.Connection, *metadata: sa.MetaData, **options: Any) -> MigrationScript:
    target: Any = list(metadata) if len(metadata) > 1 else metadata[0]  # Alembic takes both, its types one
    context = MigrationContext.configure(connection, opts={"compare_server_default": True, **options})
    return produce_migrations(context, target)


def ups(script: MigrationScript) -> UpgradeOps:
    assert script.upgrade_ops is not None
    return script.upgrade_ops


def downs(script: MigrationScript) -> DowngradeOps:
    assert script.downgrade_ops is not None
    return script.downgrade_ops


def execute(connection: sa.Connection, operations: UpgradeOps | DowngradeOps) -> str:
    """Render the operations and run that text, which is what a migration does."""
    context = MigrationContext.configure(connection)
    code = render_python_code(operations, migration_context=context)
    namespace: dict[str, Any] = {"op": Operations(context), "sa": sa, "postgresql": postgresql}
    exec("def migrate():\n    " + code, namespace)
    namespace["migrate"]()
    return code


def functions(connection: sa.Connection) -> list[str]:
    found = connection.scalars(
        sa.text("SELECT oid::regprocedure::text FROM pg_proc WHERE proname LIKE '%announce'")
    )
    return list(found)


def test_a_database_made_by_create_all_needs_no_migration(connection: sa.Connection) -> None:
    assert ups(compared(connection, shop.Base.metadata)).as_diffs() == []


@pytest.mark.parametrize(
    "damage",
    [
        "DROP TRIGGER background_jobs_announce ON background_jobs",
        "DROP FUNCTION background_jobs_announce CASCADE",
        "COMMENT ON FUNCTION background_jobs_announce IS 'sqla_jobs schema 0'",
        "COMMENT ON FUNCTION background_jobs_announce IS 'sqla_jobs schema mine'",
        "COMMENT ON FUNCTION background_jobs_announce IS NULL",
    ],
)
def test_a_missing_or_older_trigger_is_installed_once(connection: sa.Connection, damage: str) -> None:
    connection.execute(sa.text(damage))

    found = ups(compared(connection, shop.Base.metadata))
    execute(connection, found)

    assert found.as_diffs() == [("install_sqla_jobs", None, "background_jobs", 1)]
    assert ups(compared(connection, shop.Base.metadata)).as_diffs() == []


def test_a_newer_trigger_is_left_alone(connection: sa.Connection) -> None:
    connection.execute(sa.text("COMMENT ON FUNCTION background_jobs_announce IS 'sqla_jobs schema 99'"))

    assert ups(compared(connection, shop.Base.metadata)).as_diffs() == []


def test_a_table_that_the_user_filters_out_is_left_alone(connection: sa.Connection) -> None:
    connection.execute(sa.text("DROP TRIGGER background_jobs_announce ON background_jobs"))

    found = ups(
        compared(
            connection, shop.Base.metadata, include_object=lambda _, name, *__: name != "background_jobs"
        )
    )

    assert found.as_diffs() == []


def test_the_comparison_can_be_switched_off_in_env_py(connection: sa.Connection) -> None:
    connection.execute(sa.text("DROP TRIGGER background_jobs_announce ON background_jobs"))
    plugins = ["alembic.autogenerate.*", "~alembic.autogenerate.sqla_jobs"]

    found = ups(compared(connection, shop.Base.metadata, autogenerate_plugins=plugins))

    assert found.as_diffs() == []


def test_a_removed_job_class_takes_its_function_along_and_the_way_back_works(
    connection: sa.Connection,
) -> None:
    before = connection.scalar(sa.text("SELECT pg_get_functiondef('background_jobs_announce'::regproc)"))
    others = sa.MetaData()
    for name in ("orders", "receipts"):
        shop.Base.metadata.tables[name].to_metadata(others)

    removal = compared(connection, others)
    execute(connection, ups(removal))
    functions_left = functions(connection)
    execute(connection, downs(removal))

    kinds = [type(op) for op in ups(removal).ops if isinstance(op, UninstallOp | DropTableOp)]
    assert kinds.count(UninstallOp) == 1
    assert functions_left == []
    assert ups(compared(connection, shop.Base.metadata)).as_diffs() == []
    after = connection.scalar(sa.text("SELECT pg_get_functiondef('background_jobs_announce'::regproc)"))
    assert after == before


def test_schemas_quoted_names_conventions_and_own_comments_are_followed(
    connection: sa.Connection, empty_database_url: str
) -> None:
    class Base(DeclarativeBase):
        metadata = sa.MetaData(
            schema="Back Office",
            naming_convention={
                "pk": "pk_%(table_name)s",
                "ck": "ck_%(table_name)s_%(constraint_name)s",
            },
        )

    class Job(JobMixin, Base):
        __tablename__ = "Our Jobs"
        __table_args__ = ({"comment": "jobs of ours"} | OWN_STORAGE,)

    class Other(DeclarativeBase):
        pass

    class SecondJob(JobMixin, Other):
        __tablename__ = "jobs"

    connection.execute(sa.text('CREATE SCHEMA "Back Office"'))

    script = compared(connection, Other.metadata, Base.metadata, include_schemas=True)
    code = execute(connection, ups(script))

    assert re.findall(r"op\.(install.*)", code) == [
        "install_sqla_jobs('jobs', version=1)",
        "install_sqla_jobs('Our Jobs', schema='Back Office', version=1)",
    ]
    stored = connection.execute(
        sa.text("SELECT reloptions, obj_description(oid) FROM pg_class WHERE relname = 'Our Jobs'")
    )
    kept = ["fillfactor=70"] if OWN_STORAGE else [f"{name}={value}" for name, value in JOBS_STORAGE.items()]
    assert stored.one() == (kept, "jobs of ours")
    assert sorted(functions(connection)) == ['"Back Office"."Our Jobs_announce"()', "jobs_announce()"]
    again = compared(connection, Other.metadata, Base.metadata, include_schemas=True)
    assert ups(again).as_diffs() == []

    execute(connection, downs(script))

    assert functions(connection) == []
    assert sa.inspect(connection).get_table_names(schema="Back Office") == []


def test_a_copy_of_the_metadata_for_another_schema_gets_its_trigger(
    connection: sa.Connection, empty_database_url: str
) -> None:
    tenant = sa.MetaData()
    for table in shop.Base.metadata.sorted_tables:
        table.to_metadata(tenant, schema="tenant")
    connection.execute(sa.text("CREATE SCHEMA tenant"))

    execute(connection, ups(compared(connection, tenant, include_schemas=True)))

    assert functions(connection) == ["tenant.background_jobs_announce()"]


def test_a_table_that_only_looks_like_ours_is_left_alone(
    connection: sa.Connection, empty_database_url: str
) -> None:
    class Base(DeclarativeBase):
        pass

    class Letter(Base):
        __tablename__ = "letters"
        id: Mapped[int] = mapped_column(primary_key=True)

    class Archive(Base):
        __tablename__ = "letters_archive"
        id: Mapped[int] = mapped_column(primary_key=True)

    kinds = [kind for kind, *_ in ups(compared(connection, Base.metadata)).as_diffs()]

    assert kinds == ["add_table", "add_table"]


def test_a_migration_of_the_first_version_still_runs(connection: sa.Connection) -> None:
    operations: Any = Operations(MigrationContext.configure(connection))
    connection.execute(sa.text("DROP FUNCTION background_jobs_announce CASCADE"))

    operations.install_sqla_jobs("background_jobs", version=1)  # for ever: it is in people's histories

    assert functions(connection) == ["background_jobs_announce()"]


def test_a_migration_of_a_later_sqla_jobs_is_refused(connection: sa.Connection) -> None:
    operations: Any = Operations(MigrationContext.configure(connection))

    with pytest.raises(SchemaMismatch, match="installs schema 99 on table 'background_jobs'"):
        operations.install_sqla_jobs("background_jobs", version=99)


def test_an_upgrade_of_the_trigger_goes_back_to_the_version_before() -> None:
    upgrade = InstallOp("jobs", schema="app", version=2, replaces=1)

    assert upgrade.reverse().to_diff_tuple() == ("install_sqla_jobs", "app", "jobs", 1)
    assert InstallOp("jobs", version=2).reverse().to_diff_tuple() == ("uninstall_sqla_jobs", None, "jobs")
    assert render_python_code(UpgradeOps([upgrade])).splitlines()[1].strip() == (
        "op.install_sqla_jobs('jobs', schema='app', version=2, replaces=1)"
    )


# -- what importing costs others ---------------------------------------------------------------------


def test_the_operations_are_there_even_if_ours_are_imported_before_alembic(tmp_path: Path) -> None:
    program = "import sqla_jobs.migrations.operations; from alembic import op; op.install_sqla_jobs"

    ran = run(sys.executable, "-c", program, folder=tmp_path)

    assert (ran.returncode, ran.stderr) == (0, "")


def test_importing_alembic_brings_no_models_and_no_orm(tmp_path: Path) -> None:
    program = (
        "import sys, alembic; print(*(m for m in sys.modules if m in ('sqlalchemy.orm', 'sqla_jobs.models')))"
    )

    ran = run(sys.executable, "-c", program, folder=tmp_path)

    assert (ran.stdout.strip(), ran.stderr) == ("", "")


def test_the_worker_does_not_import_alembic(tmp_path: Path) -> None:
    program = "import sys, sqla_jobs.worker; print('alembic' in sys.modules)"

    ran = run(sys.executable, "-c", program, folder=tmp_path)

    assert (ran.stdout.strip(), ran.stderr) == ("False", "")


def test_the_template_is_the_checkouts_own() -> None:
    assert template_path() == str(Path(__file__).parents[2] / "alembic_templates" / "sqla_jobs")
