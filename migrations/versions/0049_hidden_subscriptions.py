"""Subscriptions of PostgreSQL's own, where the role of the schema's owner may not read pg_subscription.

Services hide that catalog from the administrator, who owns schema "subscriber" there. other_writers() needs names only,
which view pg_stat_subscription shows to all roles.
"""

from __future__ import annotations

from alembic import op

revision = "0049"
down_revision = "0048"

VISIBLE = (
    (
        "pg_catalog.pg_subscription w ON w.oid = o.srsubid",
        "(SELECT DISTINCT v.subid, v.subname FROM pg_catalog.pg_stat_subscription v) w ON w.subid = o.srsubid",
    ),
)


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    deleted_rows = op.get_context().script.get_revision("0022").module
    op.execute(deleted_rows._replace("other_writers(oid, subscriber.caller)", VISIBLE))
