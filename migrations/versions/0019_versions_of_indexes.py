"""The shape of a table is the same before and after TRUNCATE, and REINDEX.

An index that was built over rows that had been updated may not be used by older snapshots: pg_index.indcheckxmin. To
build it anew ends that and writes its row, also in a transaction of ours. So the row's version (xmin) is no part of the
shape; what can change of an index is.
"""

from __future__ import annotations

from alembic import op

revision = "0019"
down_revision = "0018"

VERSION = ", ':', i.xmin)"
PROPERTIES = (
    ", ':', i.indisunique, i.indisprimary, i.indisexclusion, i.indimmediate, i.indisvalid, i.indisready, i.indislive,"
    " i.indisreplident)"
)


def upgrade() -> None:
    """Upgrade only: there is no downgrade."""
    script = op.get_context().script
    shapes = (script.get_revision("0010").module.TABLE_SHAPE, script.get_revision("0015").module.GUARDED_SHAPE)
    for shape in shapes:
        op.execute(shape.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1).replace(VERSION, PROPERTIES))
    op.execute("ALTER FUNCTION subscriber.table_shape(oid, text) SET search_path = pg_catalog, pg_temp")
