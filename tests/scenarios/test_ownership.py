"""The role that applies changes, and the refused roles."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.scenarios.conftest import Pair

# Records the role that runs it; fires for replicated rows.
WITNESS = """
CREATE FUNCTION app.witness() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN NEW.seen_by := current_user; RETURN NEW; END $$;
CREATE TRIGGER witness BEFORE INSERT OR UPDATE ON app.t FOR EACH ROW EXECUTE FUNCTION app.witness();
ALTER TABLE app.t ENABLE ALWAYS TRIGGER witness;
"""


@pytest.fixture
async def owned(pair: Pair) -> AsyncIterator[Pair]:
    """Table app.t, which belongs to role app_owner on the target."""
    await pair.source.execute("CREATE SCHEMA app", "CREATE TABLE app.t (id int PRIMARY KEY)")
    await pair.source.execute("INSERT INTO app.t VALUES (1)")
    for role in ("app_owner", "app_admin"):
        await pair.target.execute(f"DROP ROLE IF EXISTS {role}", f"CREATE ROLE {role}")
    await pair.target.execute(
        "CREATE SCHEMA app AUTHORIZATION app_owner",
        "CREATE TABLE app.t (id int PRIMARY KEY, seen_by name)",
        WITNESS,
        "ALTER TABLE app.t OWNER TO app_owner",
    )
    yield pair
    await pair.subscriber.stop()
    await pair.target.execute("DROP OWNED BY app_owner, app_admin CASCADE")
    await pair.target.execute("UPDATE subscriber.subscription SET subowner = 'postgres'::regrole")
    await pair.target.execute("DROP ROLE app_owner", "DROP ROLE app_admin")


async def owned_by_admin(pair: Pair, **options: object) -> None:
    """Make app_admin, which is not a superuser, the owner of the subscription."""
    await pair.target.execute("ALTER ROLE app_admin SUPERUSER")
    await pair.source.execute("CREATE PUBLICATION p FOR TABLE app.t")
    await pair.subscriber.create(pair.source, "p", "s", enabled=False, password_required=False, **options)
    await pair.subscriber.execute("ALTER SUBSCRIPTION s OWNER TO app_admin")
    await pair.target.execute("ALTER ROLE app_admin NOSUPERUSER")


async def test_copy_and_changes_run_as_the_owner_of_the_table(owned: Pair) -> None:
    await owned.subscribe("FOR TABLE app.t")
    await owned.change("INSERT INTO app.t VALUES (2)", "UPDATE app.t SET id = 3 WHERE id = 2")
    assert await owned.rows("SELECT * FROM app.t ORDER BY id") == [(1, "app_owner"), (3, "app_owner")]
    await owned.change("DELETE FROM app.t WHERE id = 3", "TRUNCATE app.t", "INSERT INTO app.t VALUES (4)")
    assert await owned.rows("SELECT * FROM app.t") == [(4, "app_owner")]


async def test_tables_are_looked_at_as_nobodys_owner(owned: Pair) -> None:
    """The first change of a table follows those of a partitioned table, which are applied as its owner."""
    await owned.both("CREATE TABLE app.p (id int PRIMARY KEY) PARTITION BY HASH (id)", "CREATE TABLE app.u (id int)")
    await owned.both("CREATE TABLE app.p1 PARTITION OF app.p FOR VALUES WITH (modulus 1, remainder 0)")
    await owned.target.execute(*(f"ALTER TABLE app.{name} OWNER TO app_owner" for name in ("p", "p1", "u")))
    await owned.subscribe("FOR TABLE app.p, app.u WITH (publish_via_partition_root)")
    await owned.change("BEGIN; INSERT INTO app.p VALUES (1); INSERT INTO app.u VALUES (1); TRUNCATE app.p; COMMIT")
    assert await owned.rows("SELECT * FROM app.u") == [(1,)]
    assert not owned.subscriber.log.has("ERROR")


async def test_changes_run_as_the_owner_of_the_subscription_with_run_as_owner(owned: Pair) -> None:
    await owned_by_admin(owned, run_as_owner=True)
    await owned.target.execute("GRANT USAGE ON SCHEMA app TO app_admin", "GRANT ALL ON app.t TO app_admin")
    await owned.subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
    await owned.caught_up()
    await owned.change("INSERT INTO app.t VALUES (2)")
    assert await owned.rows("SELECT * FROM app.t ORDER BY id") == [(1, "app_admin"), (2, "app_admin")]
    await owned.target.execute("REVOKE INSERT ON app.t FROM app_admin")
    await owned.source.execute("INSERT INTO app.t VALUES (5)")
    await owned.fails("ERROR:  permission denied for table t")
    await owned.target.execute("GRANT INSERT ON app.t TO app_admin")
    await owned.caught_up()


async def test_an_owner_who_may_not_be_the_tables_owner_is_refused(owned: Pair) -> None:
    await owned_by_admin(owned)
    await owned.target.needs(16, "SET ROLE can be granted")
    await owned.subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
    await owned.fails('ERROR:  role "app_admin" cannot SET ROLE to "app_owner"')
    assert await owned.rows("SELECT * FROM app.t") == []
    await owned.target.execute("GRANT app_owner TO app_admin WITH SET TRUE, INHERIT FALSE")
    await owned.caught_up()
    await owned.change("INSERT INTO app.t VALUES (2)")
    await owned.change("DELETE FROM app.t WHERE id = 2")  # the table has been looked at, and is as it was
    await owned.target.execute("REVOKE app_owner FROM app_admin")
    await owned.source.execute("INSERT INTO app.t VALUES (3)")
    await owned.subscriber.log.wait_for(r'cannot SET ROLE to "app_owner"\n(?:.*\n)*.*cannot SET ROLE to "app_owner"')
    assert await owned.rows("SELECT * FROM app.t") == [(1, "app_owner")]


async def test_row_level_security_is_an_error_and_leaves_no_row_out(owned: Pair) -> None:
    await owned.subscribe("FOR TABLE app.t")
    await owned.target.execute(
        "ALTER TABLE app.t ENABLE ROW LEVEL SECURITY", "ALTER TABLE app.t FORCE ROW LEVEL SECURITY"
    )
    await owned.source.execute("INSERT INTO app.t VALUES (2)")
    await owned.fails('ERROR:  user "app_owner" cannot replicate into relation with row-level security enabled: "t"')
    await owned.target.execute("ALTER TABLE app.t NO FORCE ROW LEVEL SECURITY")  # which then spares the owner
    await owned.caught_up()
    assert await owned.rows("SELECT id FROM app.t ORDER BY id") == [(1,), (2,)]


async def test_row_level_security_is_an_error_of_the_copy(owned: Pair) -> None:
    forced = "ALTER TABLE app.t ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY"
    await owned.target.execute(forced, "CREATE POLICY everything ON app.t USING (true)")
    await owned.source.execute("CREATE PUBLICATION p FOR TABLE app.t")
    await owned.subscriber.create(owned.source, "p")
    await owned.fails('ERROR:  user "app_owner" cannot replicate into relation with row-level security enabled: "t"')
    await owned.target.execute("ALTER TABLE app.t NO FORCE ROW LEVEL SECURITY")
    await owned.caught_up()
    assert await owned.rows("SELECT id FROM app.t") == [(1,)]
