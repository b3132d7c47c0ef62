"""`binary` is not set: values arrive in binary as long as every column's type allows it, and as text afterwards."""

from __future__ import annotations

from datetime import datetime

import pytest

from subscriber.catalog.store.subscriptions import load_subscriptions
from subscriber.catalog.store.workers import load_workers
from subscriber.status.model import SubscriptionStatus, assess
from subscriber.status.report import as_json, describe
from subscriber.status.snapshot import PublisherAnswer, StatusSnapshot
from tests.code_type import CODE
from tests.scenarios.conftest import Pair

AS_TEXT = 'worker for subscription "s" will restart to receive values as text\n.*DETAIL:  '


async def status(pair: Pair) -> tuple[SubscriptionStatus, datetime]:
    """Return the status of subscription s, without the publisher's answer."""
    async with pair.target.connection() as connection:
        (subscription,) = await load_subscriptions(connection)
        workers = await load_workers(connection)
        now = await connection.fetchval("SELECT now()")
    return assess(subscription, StatusSnapshot(now, 1, [subscription], workers, {}), PublisherAnswer()), now


async def shown(pair: Pair, form: str, reason: str | None = None) -> None:
    """Check that the stream has that format, and that `subscriber status` reports it."""
    await pair.target.wait_for(
        "SELECT state || ' ' || format FROM subscriber.worker WHERE relid = 0", f"streaming {form}"
    )
    worker_status, at = await status(pair)
    assert (worker_status.format, worker_status.format_reason) == (form, reason)
    assert dict(describe(worker_status, at))["format"] == (form if reason is None else f"{form}: {reason}")
    assert as_json(worker_status, at)["format_reason"] == reason


async def test_a_table_with_types_that_differ_is_sent_as_text(pair: Pair) -> None:
    await pair.both(
        "CREATE TABLE t (id int PRIMARY KEY, n numeric, at timestamptz)",
        "CREATE TYPE mood AS ENUM ('sad', 'ok')",
        "CREATE TABLE u (id int PRIMARY KEY, mood mood)",
    )
    await pair.source.execute("INSERT INTO u VALUES (1, 'sad')")
    await pair.subscribe("FOR ALL TABLES")
    await pair.change("INSERT INTO t VALUES (1, 1.5, now())", "UPDATE t SET n = 'NaN'")
    await shown(pair, "binary")
    await pair.change(
        "BEGIN; INSERT INTO t VALUES (2, 2, now()); INSERT INTO u VALUES (2, 'ok'); DELETE FROM t WHERE id = 1;"
        " UPDATE u SET mood = 'ok' WHERE id = 1; COMMIT"
    )
    await shown(pair, "text", 'column "mood" of table "public.u" is of type public.mood')
    await pair.assert_same("SELECT * FROM t ORDER BY id")
    await pair.assert_same("SELECT id, mood::text FROM u ORDER BY id")
    assert pair.subscriber.log.has(AS_TEXT + 'Column "mood" of table "public.u" is of type public.mood')
    assert not pair.subscriber.log.has("ERROR")
    assert await pair.target.value("SELECT apply_error_count FROM subscriber.pg_stat_subscription_stats") == 0


@pytest.mark.parametrize("streaming", ["off", "on", "parallel"])
async def test_a_type_that_changes_meanwhile(pair: Pair, streaming: str) -> None:
    """Nothing is lost or applied twice, in one transaction that is large enough to be streamed, or prepared."""
    await pair.both("CREATE TABLE t (n int)", "CREATE TABLE u (n int)")  # without keys: twice would not be refused
    await pair.source.execute("CREATE PUBLICATION p FOR ALL TABLES")
    dsn = pair.source.dsn(options="-c logical_decoding_work_mem=64kB")
    await pair.subscriber.create(dsn, "p", streaming=streaming, two_phase=True)
    await pair.caught_up()
    await pair.change("INSERT INTO t VALUES (1)", "INSERT INTO u VALUES (1)")
    await shown(pair, "binary")
    await pair.source.execute("ALTER TABLE u ALTER n TYPE bigint")
    await pair.source.execute(
        "BEGIN; INSERT INTO t SELECT generate_series(2, 5000); INSERT INTO u VALUES (2); PREPARE TRANSACTION 'x'"
    )
    await pair.source.execute("COMMIT PREPARED 'x'")
    await pair.change("INSERT INTO t VALUES (5001)", "INSERT INTO u VALUES (3)")
    await shown(pair, "text", 'column "n" of table "public.u" is of type integer, and of type int8 on the publisher')
    await pair.assert_same("SELECT n FROM t ORDER BY n")
    await pair.assert_same("SELECT n FROM u ORDER BY n")
    await pair.target.execute("ALTER TABLE u ALTER n TYPE bigint")
    await pair.subscriber.execute(
        "ALTER SUBSCRIPTION s SET (synchronous_commit = local)"
    )  # restarting the worker clears the reason for text
    await pair.change("INSERT INTO u VALUES (4)")
    await shown(pair, "binary")
    await pair.assert_same("SELECT n FROM u ORDER BY n")
    assert not pair.subscriber.log.has("ERROR")


@pytest.mark.parametrize("form", ["bigint", "float4", "text"])
async def test_a_type_that_the_target_alters(pair: Pair, form: str) -> None:
    """The received value is too short for the new type, or has another meaning in it, or cannot be distinguished."""
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, n int)")
    await pair.subscribe("FOR TABLE t")
    await pair.change("INSERT INTO t VALUES (1, 1)")
    await shown(pair, "binary")
    await pair.target.execute(f"ALTER TABLE t ALTER n TYPE {form}")
    await pair.change("UPDATE t SET n = 1094861636 WHERE id = 1", "INSERT INTO t VALUES (2, 2)")
    name = {"float4": "real"}.get(form, form)
    await shown(pair, "text", f'column "n" of table "public.t" is of type {name}, and of type int4 on the publisher')
    expected = await pair.source.rows(f"SELECT id, n::{form} FROM t ORDER BY id")
    assert await pair.rows("SELECT id, n FROM t ORDER BY id") == expected
    assert not pair.subscriber.log.has("ERROR")


async def test_updates_that_are_quicker_from_text(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, a int[])")
    await pair.subscribe("FOR TABLE t")
    await shown(pair, "binary")
    await pair.change("INSERT INTO t VALUES (1, '{1,2}')")
    await shown(pair, "text", 'updates of table "public.t", which has a column of arrays, are quicker from text')
    await pair.assert_same("SELECT * FROM t")


async def test_a_format_chosen_by_the_user_is_shown_without_a_reason(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE t", binary=False)
    await shown(pair, "text")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s SET (binary = true)")
    await shown(pair, "binary")


# Of types that contain one without a binary format.
VALUES = {
    "code": "7",
    "code[]": "{7,8}",
    "labeled": "7",
    "pair": "(a,7)",
    "pair[]": '{"(a,7)"}',
    "span": "[7,9)",
    "spans": "{[7,9)}",
    "many": "{7}",
    "nested": '("{""[7,9)""}",{7})',
    "aclitem[]": "{=r/postgres}",
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("late", [False, True])
async def test_a_type_without_a_binary_format(pair: Pair, kind: str, late: bool) -> None:
    """The publisher cannot send such a value in binary: text is chosen before, or after the publisher's refusal."""
    await pair.target.needs(14, "multiranges")
    await pair.both(CODE, "CREATE TABLE t (id int PRIMARY KEY)")
    if not late:
        await pair.both(f"ALTER TABLE t ADD v {kind}")
        await pair.source.execute(f"INSERT INTO t VALUES (1, '{VALUES[kind]}')")
    await pair.subscribe("FOR TABLE t")
    await pair.change("INSERT INTO t VALUES (2)")
    if late:
        await shown(pair, "binary")
        await pair.both(f"ALTER TABLE t ADD v {kind}")
    await pair.change(f"INSERT INTO t VALUES (3, '{VALUES[kind]}')", "UPDATE t SET v = NULL WHERE id = 2")
    await pair.target.wait_for("SELECT format FROM subscriber.worker WHERE relid = 0", "text")
    await pair.assert_same("SELECT id, v::text FROM t ORDER BY id")
    assert not pair.subscriber.log.has("ERROR")
    assert await pair.target.value("SELECT apply_error_count FROM subscriber.pg_stat_subscription_stats") == 0
