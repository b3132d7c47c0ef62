"""`binary` may be unset, and workers report the format in which they receive values."""

from __future__ import annotations

from alembic import op

revision = "0009"
down_revision = "0008"

# An unset option is NULL. PostgreSQL has no unset options, so its view shows the default of its own CREATE
# SUBSCRIPTION.
VIEW = """
CREATE OR REPLACE VIEW subscriber.pg_subscription AS
SELECT s.subid AS oid, d.oid AS subdbid, s.subskiplsn, s.subname, s.subowner, s.subenabled,
       coalesce(s.subbinary, false) AS subbinary,
       s.substream, s.subtwophasestate, s.subdisableonerr, s.subpasswordrequired, s.subrunasowner, s.subfailover,
       CASE WHEN pg_catalog.pg_has_role(s.subowner, 'USAGE') THEN s.subconninfo END AS subconninfo,
       s.subslotname, s.subsynccommit, s.subpublications, s.suborigin
  FROM subscriber.subscription s
  JOIN pg_catalog.pg_database d ON d.datname = pg_catalog.current_database()
"""


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade.

    Existing subscriptions keep their value of `binary`, as if it had been set.
    """
    op.execute("ALTER TABLE subscriber.subscription ALTER COLUMN subbinary DROP NOT NULL")
    op.execute(VIEW)
    op.execute("ALTER TABLE subscriber.worker ADD COLUMN format text, ADD COLUMN format_reason text")
