"""The entry point `alembic.plugins`: makes our operations known, and our comparison part of autogenerate.

Every `import alembic` in an environment that has sqla_jobs runs this, half-way through that import: no
models, nothing of `alembic.autogenerate` that is not there yet. Does no work of its own.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alembic.autogenerate.api import AutogenContext
    from alembic.operations.ops import UpgradeOps
    from alembic.runtime.plugins import Plugin
    from alembic.util import PriorityDispatchResult

__all__ = ["setup"]

# Nothing of Alembic may be imported at the top: whoever imports this module before Alembic would start
# Alembic's import in the middle of ours, and Alembic would find a module without `setup`.


def setup(plugin: "Plugin") -> None:
    """Register operations and comparison; Alembic calls it.

    `plugin` is active only where an env.py names it, and a missing trigger must not depend on that. So the
    comparison sits in a second plugin, whose name the default `autogenerate_plugins`,
    `["alembic.autogenerate.*"]`, includes; `"~alembic.autogenerate.sqla_jobs"` switches it off.
    """
    from alembic.runtime.plugins import Plugin
    from alembic.util import DispatchPriority

    # for its effect; no name is taken from it, so it may itself be the one that began to import Alembic
    import sqla_jobs.migrations.operations  # noqa: F401

    # LAST: after Alembic's own comparison, whose create_table and drop_table ours goes by
    Plugin("alembic.autogenerate.sqla_jobs").add_autogenerate_comparator(
        _compare, "schema", "sqla_jobs", qualifier="postgresql", priority=DispatchPriority.LAST
    )


def _compare(
    context: "AutogenContext", upgrade_ops: "UpgradeOps", _: set[str | None]
) -> "PriorityDispatchResult":
    from sqla_jobs.migrations.compare import compare

    return compare(context, upgrade_ops)
