"""Sequences of publishers of each version, on targets of each version."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from subscriber.errors import StatementError
from subscriber.settings import Settings
from tests.plugins.fix_cluster import Database, ServerOf, database_with_schema, fresh_database
from tests.plugins.fix_subscriber import running_subscriber
from tests.scenarios.conftest import Pair

STATES = """
SELECT r.srrelid::regclass::text, r.srsubstate::text, r.srsublsn IS NOT NULL
  FROM subscriber.pg_subscription_rel r JOIN pg_class c ON c.oid = r.srrelid AND c.relkind = 'S' ORDER BY 1
"""
VALUES = "SELECT last_value, is_called FROM {}"
FOLLOW = Settings(sequence_interval=0.1, sequence_margin=10, retry_interval=0.2)


async def value(database: Database, sequence: str) -> tuple[Any, ...]:
    (row,) = await database.rows(VALUES.format(sequence))
    return row


async def synchronized(pair: Pair) -> None:
    await pair.target.wait_for("SELECT count(*) FROM subscriber.pg_subscription_rel WHERE srsubstate <> 'r'", 0)


async def assert_equal(pair: Pair, *sequences: str) -> None:
    await synchronized(pair)
    for sequence in sequences:
        assert await value(pair.target, sequence) == await value(pair.source, sequence), sequence


@pytest.fixture(
    params=[pytest.param((13, 18), marks=pytest.mark.soak), (18, 18), (19, 15), (19, 19), (13, 19)],
    ids="{0[0]}-to-{0[1]}".format,
)
async def versions(request: pytest.FixtureRequest, server_of: ServerOf) -> AsyncIterator[Pair]:
    publisher, target = request.param
    async with (
        fresh_database(server_of("publisher", publisher)) as source,
        database_with_schema(server_of("target", target)) as database,
        running_subscriber(database, settings=FOLLOW) as subscriber,
    ):
        yield Pair(source, database, subscriber)


def published(pair: Pair) -> bool:
    """Whether publications of the source contain sequences."""
    return pair.source.server.bin.as_posix().find("/19/") >= 0


async def create(pair: Pair, **options: object) -> None:
    await pair.both(
        "CREATE TABLE t (id serial PRIMARY KEY, n int GENERATED ALWAYS AS IDENTITY)",
        'CREATE SEQUENCE alone INCREMENT -5; CREATE SEQUENCE "Odd \'name"; CREATE SEQUENCE other',
    )
    await pair.source.execute(
        "INSERT INTO t SELECT FROM generate_series(1, 77)", "SELECT nextval('alone') FROM generate_series(1, 3)"
    )
    tables = "FOR ALL TABLES, ALL SEQUENCES" if published(pair) else "FOR ALL TABLES"
    if not published(pair):
        options.setdefault("sequence_names", "'public.alone, public.\"Odd ''name\"'")
    await pair.subscribe(tables, **options)


async def test_sequences_of_all_versions(versions: Pair) -> None:
    """CREATE, REFRESH SEQUENCES and REFRESH PUBLICATION do what PostgreSQL 19 does."""
    pair = versions
    await create(pair)
    await assert_equal(pair, "t_id_seq", "t_n_seq", "alone", '"Odd \'name"')
    assert await value(pair.target, "t_id_seq") == (77, True)
    states = await pair.target.rows(STATES)
    assert {(state, has_lsn) for _, state, has_lsn in states} == {("r", True)}
    await pair.source.execute(
        "SELECT setval('alone', -1000, false)",
        "TRUNCATE t RESTART IDENTITY",
        "INSERT INTO t DEFAULT VALUES",
        "CREATE SEQUENCE late",
        "SELECT nextval('late')",
    )
    await pair.caught_up()  # TRUNCATE restarts sequences of the target as well
    assert await value(pair.target, "alone") == (-11, True)  # nothing follows by itself
    await pair.target.execute("CREATE SEQUENCE late")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s REFRESH SEQUENCES")
    await assert_equal(pair, "t_id_seq", "alone")
    assert await value(pair.target, "alone") == (-1000, False)
    assert await value(pair.target, "late") == (1, False)  # a new one is not added
    if published(pair):
        await pair.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
        await assert_equal(pair, "late")
        assert await value(pair.target, "late") == (1, True)
    await pair.subscriber.execute("DROP SUBSCRIPTION s")


async def test_sequences_stay_ahead(versions: Pair) -> None:
    """`follow` moves them in the direction of their increment, and reports one that was set back."""
    pair = versions
    await create(pair, sequences="follow")
    await synchronized(pair)
    await pair.target.wait_for("SELECT last_value >= 87 FROM t_id_seq", True)
    await pair.target.wait_for("SELECT last_value <= -61 FROM alone", True)
    await pair.source.execute("SELECT nextval('alone') FROM generate_series(1, 1000)")
    last, _ = await value(pair.source, "alone")
    await pair.target.wait_for(f"SELECT last_value <= {last} FROM alone", True)
    before, _ = await value(pair.target, "t_id_seq")
    await pair.source.execute("SELECT setval('t_id_seq', 5)")
    await pair.fails(r'sequence "public.t_id_seq" was set back on the publisher, from 77 to 5')
    assert (await value(pair.target, "t_id_seq"))[0] >= before
    await pair.subscriber.execute(
        "ALTER SUBSCRIPTION s SET (sequences = 'copy')", "ALTER SUBSCRIPTION s REFRESH SEQUENCES"
    )
    await assert_equal(pair, "t_id_seq", "alone")
    await pair.subscriber.execute("DROP SUBSCRIPTION s")


async def test_problems_have_names(versions: Pair) -> None:
    """One that cannot be set is named with the reason; the others are set, and it is retried."""
    pair = versions
    await pair.both("CREATE SEQUENCE good", "CREATE SEQUENCE gone", "CREATE SEQUENCE refused", "CREATE TABLE t ()")
    await pair.source.execute("CREATE SEQUENCE other START 10", "SELECT nextval('good')")
    await pair.target.execute("CREATE SEQUENCE other")
    names = "'public.good, public.gone, public.refused, public.other'"
    publication = "FOR ALL SEQUENCES" if published(pair) else "FOR TABLE t"
    await pair.source.execute(f"CREATE PUBLICATION p {publication}")
    await pair.subscriber.create(pair.source, "p", "s", sequence_names=names)
    await pair.fails(r'mismatched or renamed sequence on subscriber \("public.other"\)')
    await pair.fails('logical replication sequence synchronization failed for subscription "s"')
    await pair.target.wait_for("SELECT last_value FROM good", 1)
    await pair.target.wait_for("SELECT is_called FROM good", True)
    await pair.source.execute("DROP SEQUENCE gone")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s REFRESH SEQUENCES")
    await pair.fails(r'missing sequence on publisher \("public.gone"\)')
    column = "sync_seq_error_count" if pair.target.server.bin.as_posix().find("/19/") >= 0 else "apply_error_count >= 0"
    await pair.target.wait_for(f"SELECT ({column})::int > 0 FROM subscriber.pg_stat_subscription_stats", True)
    await pair.source.execute("ALTER SEQUENCE other START 1", "CREATE SEQUENCE gone")
    await assert_equal(pair, "good", "gone", "other")
    await pair.subscriber.execute("DROP SUBSCRIPTION s")


async def test_sequences_that_are_left_alone(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id serial PRIMARY KEY)")
    await pair.source.execute("INSERT INTO t DEFAULT VALUES")
    await pair.subscribe("FOR ALL TABLES", sequences="none")
    assert await pair.target.rows(STATES) == []
    assert await value(pair.target, "t_id_seq") == (1, False)


async def test_no_sequence_is_set_without_copy_data(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id serial PRIMARY KEY)")
    await pair.source.execute("INSERT INTO t DEFAULT VALUES")
    await pair.subscribe("FOR ALL TABLES", copy_data=False)
    assert await pair.target.rows(STATES) == [("t_id_seq", "r", False)]
    assert await value(pair.target, "t_id_seq") == (1, False)


async def test_a_named_sequence_has_to_exist(pair: Pair) -> None:
    await pair.both("CREATE TABLE t ()")
    await pair.source.execute("CREATE PUBLICATION p FOR TABLE t")
    with pytest.raises(StatementError, match=r'relation "public\.missing" does not exist'):
        await pair.subscriber.create(pair.source, "p", "s", sequence_names="'public.missing'")
    with pytest.raises(StatementError, match=r'"public\.t" is not a sequence'):
        await pair.subscriber.create(pair.source, "p", "s", sequence_names="'public.t'")


async def test_the_owner_of_a_subscription_needs_update_on_a_sequence(pair: Pair) -> None:
    """With run_as_owner it sets sequences. One that it may not set is a problem, and the others are set."""
    role = f"owner_{pair.target.name}"
    await pair.both("CREATE TABLE t (id serial PRIMARY KEY, n serial)")
    await pair.source.execute("INSERT INTO t DEFAULT VALUES")
    await pair.target.execute(
        f"CREATE ROLE {role}",
        f"GRANT CREATE ON DATABASE {pair.target.name} TO {role}",
        f"GRANT ALL ON t, t_n_seq TO {role}",
    )
    await pair.subscribe("FOR ALL TABLES", run_as_owner=True, password_required=False)
    await pair.source.execute("INSERT INTO t DEFAULT VALUES")
    await pair.subscriber.execute(f"ALTER SUBSCRIPTION s OWNER TO {role}")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s REFRESH SEQUENCES")
    await pair.target.wait_for(
        "SELECT problem FROM subscriber.subscription_sequence WHERE seqname = 't_id_seq'",
        'insufficient privileges on subscriber sequence ("public.t_id_seq")',
    )
    await pair.target.wait_for("SELECT last_value FROM t_n_seq", 2)
    assert await value(pair.target, "t_id_seq") == (1, True)
    await pair.target.execute(f"GRANT UPDATE ON t_id_seq TO {role}")
    await assert_equal(pair, "t_id_seq", "t_n_seq")


async def test_a_superuser_needs_no_privilege_on_a_sequence(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id serial PRIMARY KEY)")
    await pair.source.execute("INSERT INTO t DEFAULT VALUES")
    await pair.subscribe("FOR ALL TABLES")
    await pair.target.execute("REVOKE UPDATE ON t_id_seq FROM postgres")
    await pair.source.execute("INSERT INTO t DEFAULT VALUES")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s REFRESH SEQUENCES")
    await assert_equal(pair, "t_id_seq")
