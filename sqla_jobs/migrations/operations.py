"""`op.install_sqla_jobs` and `op.uninstall_sqla_jobs`: what `sqla_jobs.schema` says, as Alembic operations.

They ask the database nothing, so they work offline (`--sql`) too. Importing this registers them; that
happens in the middle of `import alembic` (see plugin). Does not create or drop tables.
"""

from typing import TYPE_CHECKING, Any

from alembic.autogenerate.render import renderers
from alembic.operations import MigrateOperation, Operations
from sqlalchemy import DDL

from sqla_jobs import schema as ddl
from sqla_jobs.errors import SchemaMismatch

if TYPE_CHECKING:
    from alembic.autogenerate.api import AutogenContext

__all__ = ["InstallOp", "UninstallOp"]


@Operations.register_operation("install_sqla_jobs")
class InstallOp(MigrateOperation):
    """Complete a jobs table: trigger and stamp. `replaces` is the version to go back to, 0 for none."""

    def __init__(self, name: str, *, schema: str | None = None, version: int, replaces: int = 0) -> None:
        self.name, self.schema, self.version, self.replaces = name, schema, version, replaces

    @classmethod
    def install_sqla_jobs(
        cls, operations: Operations, name: str, *, schema: str | None = None, version: int, replaces: int = 0
    ) -> None:
        """Complete the jobs table `name`, which exists, with what schema `version` of sqla_jobs needs.

        Running it again changes nothing. Raises `SchemaMismatch` when this sqla_jobs has not that version.
        Example: `op.install_sqla_jobs("background_jobs", version=1)`.
        """
        operations.invoke(cls(name, schema=schema, version=version, replaces=replaces))

    def reverse(self) -> MigrateOperation:
        """Back to the version before, or to none."""
        if self.replaces:
            return InstallOp(self.name, schema=self.schema, version=self.replaces)
        return UninstallOp(self.name, schema=self.schema, version=self.version)

    def to_diff_tuple(self) -> tuple[Any, ...]:
        """What `alembic check` and `compare_metadata` show."""
        return ("install_sqla_jobs", self.schema, self.name, self.version)


@Operations.register_operation("uninstall_sqla_jobs")
class UninstallOp(MigrateOperation):
    """Take back what `InstallOp` did; `version` is what there was, for the way back."""

    def __init__(self, name: str, *, schema: str | None = None, version: int = ddl.VERSION) -> None:
        self.name, self.schema, self.version = name, schema, version

    @classmethod
    def uninstall_sqla_jobs(cls, operations: Operations, name: str, *, schema: str | None = None) -> None:
        """Take trigger and function of the jobs table `name` away; the rows stay, inserts wake nobody.

        Changes nothing where they are not there. Example: `op.uninstall_sqla_jobs("background_jobs")`.
        """
        operations.invoke(cls(name, schema=schema))

    def reverse(self) -> InstallOp:
        """Install what there was."""
        return InstallOp(self.name, schema=self.schema, version=self.version)

    def to_diff_tuple(self) -> tuple[Any, ...]:
        """What `alembic check` and `compare_metadata` show."""
        return ("uninstall_sqla_jobs", self.schema, self.name)


@Operations.implementation_for(InstallOp)
def _install(operations: Operations, operation: InstallOp) -> None:
    # There is one version yet. A second must keep the text of the first: a migration in somebody's history
    # says version=1 for ever, and installing today's text for it would need columns that come later.
    if operation.version != ddl.VERSION:
        raise SchemaMismatch(
            f"the migration installs schema {operation.version} on table {operation.name!r}, this version of "
            f"sqla_jobs has schema {ddl.VERSION}: install the sqla_jobs that the migration was made with"
        )
    _run(operations, *ddl.install(operation.name, operation.schema))


@Operations.implementation_for(UninstallOp)
def _uninstall(operations: Operations, operation: UninstallOp) -> None:
    _run(operations, *ddl.uninstall(operation.name, operation.schema))


def _run(operations: Operations, *statements: str) -> None:
    for statement in statements:
        # DDL and not a plain string: that would be read as text(), where a colon begins a parameter
        operations.execute(DDL(statement.replace("%", "%%")))  # type: ignore[no-untyped-call]


@renderers.dispatch_for(InstallOp)
def _render_install(context: "AutogenContext", op: InstallOp) -> str:
    options = f", version={op.version}" + (f", replaces={op.replaces}" if op.replaces else "")
    return _rendered(context, "install_sqla_jobs", op, options)


@renderers.dispatch_for(UninstallOp)
def _render_uninstall(context: "AutogenContext", op: UninstallOp) -> str:
    return _rendered(context, "uninstall_sqla_jobs", op, "")


def _rendered(context: "AutogenContext", verb: str, op: InstallOp | UninstallOp, options: str) -> str:
    # str(): a name that the user quoted is a quoted_name
    schema = f", schema={str(op.schema)!r}" if op.schema else ""
    return f"{context.opts['alembic_module_prefix'] or ''}{verb}({str(op.name)!r}{schema}{options})"
