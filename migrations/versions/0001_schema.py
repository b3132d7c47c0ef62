"""The only revision of Alembic: schema.sql, which a new database gets as a whole."""

from __future__ import annotations

from alembic import op

from subscriber.catalog import schema

revision = schema.newest_revision()
down_revision = None


def upgrade() -> None:
    """Create the schema. There is no downgrade."""
    # Several statements in one message, which SQLAlchemy itself does not send.
    op.get_bind().connection.dbapi_connection.run_async(lambda driver: driver.execute(schema.schema_text()))
