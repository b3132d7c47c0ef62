"""The owner of schema "subscriber" keeps its privileges when it drops its last subscription.

A role that owns no subscription any more loses the privileges of that duty. The owner of the schema lost them, too, and
could neither create another subscription nor move the database. A member of pg_create_subscription still had them by
that role, which does not exist before PostgreSQL 16.
"""

from __future__ import annotations

from alembic import op

revision = "0039"
down_revision = "0036"

ADMIT_OWNER = """
CREATE OR REPLACE FUNCTION subscriber.admit_owner() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    schema_owner oid := (SELECT n.nspowner FROM pg_catalog.pg_namespace n WHERE n.nspname = 'subscriber');
BEGIN
    IF TG_OP <> 'DELETE' AND NEW.subowner <> schema_owner
       AND NOT (SELECT r.rolsuper FROM pg_catalog.pg_roles r WHERE r.oid = NEW.subowner) THEN
        PERFORM subscriber.admit(pg_catalog.pg_get_userbyid(NEW.subowner), 'owner');
    END IF;
    IF TG_OP <> 'INSERT' AND OLD.subowner <> schema_owner
       AND EXISTS (SELECT FROM pg_catalog.pg_roles r WHERE r.oid = OLD.subowner AND NOT r.rolsuper)
       AND NOT EXISTS (SELECT FROM subscriber.subscription s WHERE s.subowner = OLD.subowner) THEN
        PERFORM subscriber.dismiss(pg_catalog.pg_get_userbyid(OLD.subowner), 'owner');
    END IF;
    RETURN NULL;
END $$
"""
# An owner that has lost its privileges may still grant them to itself.
READMIT = """
SELECT subscriber.admit(r.rolname::text, 'owner') FROM pg_catalog.pg_namespace n
  JOIN pg_catalog.pg_roles r ON r.oid = n.nspowner WHERE n.nspname = 'subscriber' AND NOT r.rolsuper
"""


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    op.execute(ADMIT_OWNER)
    op.execute(READMIT)
