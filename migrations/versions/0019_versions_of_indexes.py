"""The shape of a table does not change with TRUNCATE and REINDEX.

An index that was built over updated rows may not be used by older snapshots: pg_index.indcheckxmin. Rebuilding the
index clears the flag and writes the row of pg_index, also in one of our transactions. The version of that row (xmin) is
therefore not part of the shape; the properties of an index that can change are.
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
    """Upgrade the catalog. There is no downgrade."""
    script = op.get_context().script
    shapes = (script.get_revision("0010").module.TABLE_SHAPE, script.get_revision("0015").module.GUARDED_SHAPE)
    for shape in shapes:
        op.execute(shape.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1).replace(VERSION, PROPERTIES))
    op.execute("ALTER FUNCTION subscriber.table_shape(oid, text) SET search_path = pg_catalog, pg_temp")
