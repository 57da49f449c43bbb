"""What autogenerate adds for jobs tables: installs that are missing or older, uninstalls before a drop.

Runs after Alembic's own comparison, asks the database once. Does not compare tables, columns or indexes:
Alembic does.
"""

import logging
from collections.abc import Iterator

from alembic.autogenerate.api import AutogenContext
from alembic.operations.ops import CreateTableOp, DropTableOp, UpgradeOps
from alembic.util import PriorityDispatchResult
from sqlalchemy import Connection, Table, text

from sqla_jobs.migrations.operations import InstallOp, UninstallOp
from sqla_jobs.schema import VERSION

__all__ = ["compare"]

# below "alembic": shown where Alembic's own "Detected added table" is
_log = logging.getLogger("alembic.autogenerate.sqla_jobs")

# As schema.require_schema looks: by the table's own trigger, since a function alone wakes nobody.
_INSTALLED = text(
    "SELECT n.nspname, c.relname, "
    "max(substring(obj_description(t.tgfoid, 'pg_proc') FROM '^sqla_jobs schema ([0-9]+)$')::int) "
    "FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace "
    "GROUP BY n.nspname, c.relname"
)


def compare(context: AutogenContext, upgrade_ops: UpgradeOps) -> PriorityDispatchResult:
    """Append an install for each jobs table that needs one, put an uninstall before each drop of one."""
    assert context.connection is not None
    default = context.dialect.default_schema_name
    installed = _installed(context.connection)

    # backwards, since inserting moves what follows; before the drop, so that the way back creates first
    for position, op in reversed(list(enumerate(upgrade_ops.ops))):
        if isinstance(op, DropTableOp) and (found := installed.get((op.schema or default, op.table_name))):
            upgrade_ops.ops.insert(position, UninstallOp(op.table_name, schema=op.schema, version=found))

    created = {
        (op.schema or default, op.table_name) for op in upgrade_ops.ops if isinstance(op, CreateTableOp)
    }
    for table in _jobs_tables(context):
        key = (table.schema or default, table.name)
        # What is not created exists, or is none of our business: the user's include_object says no. (What
        # include_name or include_schemas hide, Alembic creates.)
        if key in created:
            found = 0
        elif context.run_object_filters(table, table.name, "table", False, None):
            found = installed.get(key, 0)
        else:
            continue
        # a newer stamp stays: a deploy that still has the older library must not take it back
        if found < VERSION:
            install = InstallOp(table.name, schema=table.schema, version=VERSION, replaces=found)
            upgrade_ops.ops.append(install)
            _log.info("Detected jobs table %r with sqla_jobs schema %s, needs %s", table.name, found, VERSION)
    return PriorityDispatchResult.CONTINUE


def _installed(connection: Connection) -> dict[tuple[str | None, str], int]:
    """The version on the stamp, by (schema, table); 0 where a trigger is not ours."""
    return {(schema, name): version or 0 for schema, name, version in connection.execute(_INSTALLED)}


def _jobs_tables(context: AutogenContext) -> Iterator[Table]:
    """The jobs tables of the metadata, which may be a list: those that have an archive of ours.

    Known by the comment of the archive, which no user writes. The comment of the jobs table is the user's
    to replace; a registry of models would have to be imported, and does not know the copies that
    `to_metadata` makes (for a schema per tenant, say), nor is `MetaData.info` copied.
    """
    tables = {(table.schema, table.name): table for table in context.sorted_tables}
    for (schema, name), table in tables.items():
        archive = tables.get((schema, f"{name}_archive"))
        if archive is not None and archive.comment == f"sqla_jobs: archive of {name}":
            yield table
