"""Keys of ranges that only the publisher can compare: the type and the collation with which it does."""

from __future__ import annotations

from alembic import op

revision = "0031"
down_revision = "0030"

STATEMENTS = [
    "ALTER TABLE subscriber.copied_range ADD COLUMN key_comparisons text[]",
    "UPDATE subscriber.copied_range SET key_comparisons = array_fill(NULL::text, ARRAY[cardinality(key_columns)])",
    "ALTER TABLE subscriber.copied_range ALTER COLUMN key_comparisons SET NOT NULL",
]
CHANGES = (
    ("single, snapshot, lsn, timeline)", "single, snapshot, lsn, timeline, key_comparisons)"),
    ("c.snapshot, c.lsn, c.timeline", "c.snapshot, c.lsn, c.timeline, c.key_comparisons"),
)


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    deleted_rows = op.get_context().script.get_revision("0022").module
    for statement in STATEMENTS:
        op.execute(statement)
    op.execute(deleted_rows._replace("record_range(oid, bytea, jsonb)", CHANGES))
