"""A service hides pg_subscription from roles that are no superusers."""

from __future__ import annotations

import asyncpg

from subscriber.catalog import native_subscription
from tests.plugins.fix_cluster import Database


async def test_subscriptions_with_tables_are_found(source_db: Database, target_db: Database) -> None:
    role, name = f"owner_{target_db.name}", f"native_{target_db.name}"
    await source_db.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION p FOR TABLE t")
    await target_db.execute(
        "CREATE TABLE t (id int PRIMARY KEY)",
        f"CREATE SUBSCRIPTION {name} CONNECTION '{source_db.dsn()}' PUBLICATION p",
        f"CREATE ROLE {role} LOGIN",
    )
    try:
        owner = await asyncpg.connect(target_db.dsn(user=role))
        try:
            assert name in await native_subscription.load_marks(owner)
            await target_db.execute("REVOKE ALL ON pg_subscription FROM PUBLIC")
            assert name in await native_subscription.load_marks(owner)
            assert name in await native_subscription.load_enabled(owner)
        finally:
            await owner.close()
    finally:
        await target_db.execute(f"DROP SUBSCRIPTION {name}")
        await target_db.execute(f"DROP ROLE {role}")
