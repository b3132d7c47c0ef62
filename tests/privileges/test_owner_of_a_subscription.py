"""A role with duty owner writes rows of schema subscriber itself, to reach the records of other roles.

A row of a durable table names a large object, which functions with the rights of the schema's owner read, write and
remove.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import asyncpg
import pytest

from subscriber.catalog.connection import CatalogConnection
from subscriber.cli.status_lines import to_json, to_text
from subscriber.status.collect import read_catalog
from subscriber.status.model import assess
from subscriber.status.snapshot import PublisherAnswer
from tests.passwords import MARK
from tests.privileges.conftest import OTHER, OWNER, SINCE_16, Attacked

OWN, VICTIM = 3500000002, 3500000001
SUBSCRIPTION = """
INSERT INTO subscriber.subscription (subid, subname, subowner, subenabled, subconninfo, subslotname, subsynccommit,
       subpublications, subbinary, substream, subtwophasestate, subdisableonerr, subpasswordrequired, subrunasowner,
       suborigin, subfailover)
VALUES ({subid}, 's{subid}', '{owner}'::regrole, false, 'host=h password={password}', 's', 'off', '{{p}}', false, 'p',
        'd', false, true, false, 'any', false)
"""
LARGE_OBJECTS = """
SELECT m.oid::bigint, md5(lo_get(m.oid)) FROM pg_largeobject_metadata m WHERE m.oid <> ALL ($1::bigint[]::oid[])
 ORDER BY 1
"""
OF_THE_OWNER = f"""
SELECT array_agg(kept::bigint) FROM (
    SELECT kept FROM subscriber.subscription WHERE subid = {OWN}
    UNION ALL SELECT record FROM subscriber.progress_record WHERE subid = {OWN}
    UNION ALL SELECT kept FROM subscriber.subscription_rel WHERE srsubid = {OWN}
    UNION ALL SELECT kept FROM subscriber.subscription_sequence WHERE subid = {OWN}
    UNION ALL SELECT kept FROM subscriber.quarantine WHERE subid = {OWN}
    UNION ALL SELECT content FROM subscriber.quarantine WHERE subid = {OWN}) o
"""
PARK = f"""
SELECT subscriber.set_progress({OWN}, 0, '0/1');
DO $$
DECLARE claimed record := subscriber.claim_progress({OWN}, 0);
BEGIN
    PERFORM subscriber.park(claimed.record, claimed.fence, jsonb_build_object('finish_lsn', '0/5', 'remote_xid', 7,
                'relations', '[]'::jsonb, 'changes', 1, 'bytes', 1, 'depends_on', '[]'::jsonb));
    PERFORM subscriber.park_content(claimed.record, claimed.fence, '0/5', 0, 'abc');
END $$
"""


@pytest.fixture
async def owners(attacked: Attacked) -> AsyncIterator[Attacked]:
    """Two roles with a subscription each. OWNER attacks that of OTHER, and a large object of a third one."""
    await attacked.target.execute(
        f"SELECT subscriber.admit('{OWNER}', 'owner'), subscriber.admit('{OTHER}', 'owner')",
        SUBSCRIPTION.format(subid=VICTIM, owner=OTHER, password=MARK),
        SUBSCRIPTION.format(subid=OWN, owner=OWNER, password="own"),
        f"SELECT subscriber.set_progress({VICTIM}, 0, '0/77')",
        PARK,
        "SELECT lo_from_bytea(4711, 'somebody''s')",
    )
    try:
        yield attacked
    finally:
        await attacked.target.execute(
            "DELETE FROM subscriber.subscription", "SELECT lo_unlink(oid) FROM pg_largeobject_metadata WHERE oid = 4711"
        )


def attempts(number: int) -> list[str]:
    """Return statements that name a large object of another role, and use it."""
    return [
        "INSERT INTO subscriber.quarantine (subid, finish_lsn, remote_xid, relations, changes, content)"
        f" VALUES ({OWN}, '0/9', 1, '{{}}', 1, {number})",
        f"UPDATE subscriber.quarantine SET content = {number} WHERE subid = {OWN}",
        f"SELECT subscriber.read_quarantine({OWN}, '0/9', -4, 100000)",
        f"SELECT subscriber.read_quarantine({OWN}, '0/5', -4, 100000)",
        f"SELECT subscriber.edit_quarantine({OWN}, '0/9', 0, 'abc', '{{}}', 1)",
        f"SELECT subscriber.edit_quarantine({OWN}, '0/5', 0, 'abc', '{{}}', 1)",
        f"DELETE FROM subscriber.quarantine WHERE subid = {OWN}",
        "INSERT INTO subscriber.subscription_sequence (subid, nspname, seqname, state, kept)"
        f" VALUES ({OWN}, 'a', 'b', 'i', {number})",
        f"INSERT INTO subscriber.subscription_sequence (subid, nspname, seqname, state) VALUES ({OWN}, 'a', 'c', 'i')",
        f"UPDATE subscriber.subscription_sequence SET kept = {number} WHERE subid = {OWN}",
        f"DELETE FROM subscriber.subscription_sequence WHERE subid = {OWN}",
        "INSERT INTO subscriber.subscription_rel (srsubid, srrelid, srsubstate, kept)"
        f" VALUES ({OWN}, 1234, 'r', {number})",
        f"INSERT INTO subscriber.subscription_rel (srsubid, srrelid, srsubstate) VALUES ({OWN}, 1235, 'r')",
        f"UPDATE subscriber.subscription_rel SET kept = {number} WHERE srsubid = {OWN}",
        f"SELECT subscriber.renumber({OWN}, '{{1235}}', '{{1236}}')",
        f"DELETE FROM subscriber.subscription_rel WHERE srsubid = {OWN}",
        f"SELECT subscriber.read_position({number})",
        f"SELECT subscriber.read_confirmed({number})",
    ]


async def test_no_row_names_a_large_object_of_another_role(owners: Attacked) -> None:
    target = owners.target
    kept = await target.value(f"SELECT kept FROM subscriber.subscription WHERE subid = {VICTIM}")
    record = await target.value(f"SELECT record FROM subscriber.progress_record WHERE subid = {VICTIM}")
    before = await target.rows(LARGE_OBJECTS, await target.value(OF_THE_OWNER))
    assert {number for number, _ in before} >= {kept, record, 4711}
    shown = []
    async with target.connection() as connection:
        await connection.execute(f"SET SESSION AUTHORIZATION {OWNER}")
        for number in (kept, record, 4711):
            for statement in attempts(number):
                try:
                    shown += [str(value) for row in await connection.fetch(statement) for value in row]
                except asyncpg.PostgresError as error:
                    shown.append(str(error))
    for secret in (MARK, "somebody", "VICTIM", "/77"):
        assert [text for text in shown if secret in text or secret.encode().hex() in text] == []
    assert await target.rows(LARGE_OBJECTS, await target.value(OF_THE_OWNER) or []) == before


@pytest.mark.parametrize("target", SINCE_16, indirect=True, scope="session")  # the first with the role
async def test_nobody_takes_the_duty_of_all_creators(attacked: Attacked) -> None:
    """A subscription can belong to the role whose members create subscriptions. Its end takes nothing from them."""
    target = attacked.target
    await target.execute(
        f"GRANT pg_create_subscription TO {OWNER}, {OTHER}",
        f"GRANT CREATE ON DATABASE {target.name} TO {OWNER}, {OTHER}",
    )
    subscription = SUBSCRIPTION.format(subid=OWN, owner="pg_create_subscription", password="own")
    subscription = subscription.replace("(subid, ", "(").replace(f"VALUES ({OWN}, ", "VALUES (")
    await attacked.as_owner(subscription, f"DELETE FROM subscriber.subscription WHERE subname = 's{OWN}'")
    assert await target.value(
        "SELECT has_function_privilege($1, 'subscriber.create_origin(text, subscriber.caller)', 'EXECUTE')", OTHER
    )


async def test_nobody_stops_the_memory_of_deleted_rows_of_others(owners: Attacked) -> None:
    """`dropped` of set_delete_triggers() is a subscription that the caller drops."""
    target = owners.target
    await target.execute(
        "CREATE TABLE app.others (id int PRIMARY KEY)",
        f"ALTER TABLE app.others OWNER TO {OTHER}",
        f"INSERT INTO subscriber.subscription_rel (srsubid, srrelid, srsubstate)"
        f" VALUES ({VICTIM}, 'app.others'::regclass, 'r')",
        f"UPDATE subscriber.subscription SET subretaindeadtuples = true WHERE subid = {VICTIM}",
        "SELECT subscriber.set_delete_triggers('1s', NULL)",
        "INSERT INTO app.others VALUES (1); DELETE FROM app.others",
    )
    remembered = "SELECT (SELECT count(*) FROM pg_trigger WHERE tgname = 'subscriber_deleted_rows'),"
    remembered += " (SELECT count(*) FROM subscriber.deleted_row)"
    assert await target.rows(remembered) == [(1, 1)]
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="permission denied for subscription"):
        await owners.as_owner(f"SELECT subscriber.set_delete_triggers('1s', {VICTIM})")
    assert await target.rows(remembered) == [(1, 1)]


# Tables that owners write, with values that no statement writes.
HOSTILE: list[tuple[str, str, dict[str, str]]] = [
    (
        "subscription",
        "subid",
        {
            "substream": "'x'",
            "subtwophasestate": "'x'",
            "subconflicthistory": "'x'",
            "subonerror": "'x'",
            "subcopyengine": "'x'",
            "subcopyindexes": "'x'",
            "subsequences": "'x'",
            "subsequencenames": "'{a}'",
            "subwalrcvtimeout": "'x'",
            "subwalbudget": "'x'",
            "subconflictpolicy": "'x ; y'",
            "subsourcetag": "'x ; y'",
            "subsynccommit": "'off; SELECT 1'",
            "suborigin": "'x'",
            "subpublications": "'{NULL}'",
            "subslotname": "E'\\n'",
            "subapplysessions": "1000000000",
            "subquarantinelimit": "-1",
            "submaxretention": "-1",
            "subsystemid": "'x'",
            "subtimeline": "-1",
            "subtimelinehistory": "'x'",
            "subtimelinesystem": "'x'",
            "subconninfo": "'port=x'",
            "subname": "E'\\x01'",
            "subgaveup": "E'\\x1b'",
        },
    ),
    (
        "subscription_rel",
        "srsubid",
        {
            "srsubstate": "'?'",
            "srcopy": "'x'",
            "srmissedlsn": "'0/1'",
            "srmissedat": "'0001-01-01 BC'",
            "srsource": "'{NULL}'",
            "srrelid": "0",
            "srextra": "-1",
        },
    ),
    ("worker", "subid", {"error_remedy": "'1'", "started": "'0001-01-01 BC'", "streamed": "'1'"}),
]


async def test_no_row_of_an_owner_stops_the_subscriptions_of_others(attacked: Attacked) -> None:
    """Neither their launcher nor their status. Some values are refused, and others concern the owner alone."""
    target = attacked.target
    await attacked.both("CREATE TABLE t (id int PRIMARY KEY)")
    await attacked.subscribe("FOR TABLE t")
    await target.execute(f"SELECT subscriber.admit('{OWNER}', 'owner')")
    refused = set()
    for table, key, columns in HOSTILE:
        for number, (column, value) in enumerate(columns.items()):
            await target.execute(
                SUBSCRIPTION.format(subid=OWN, owner=OWNER, password="own"),
                f"INSERT INTO subscriber.subscription_rel (srsubid, srrelid, srsubstate) VALUES ({OWN}, 1234, 'r')",
                f"UPDATE subscriber.subscription SET subenabled = true WHERE subid = {OWN}",
            )
            try:
                await attacked.as_owner(f"UPDATE subscriber.{table} SET {column} = {value} WHERE {key} = {OWN}")
            except (asyncpg.CheckViolationError, asyncpg.InsufficientPrivilegeError):
                refused.add(column)
            await attacked.change(f"INSERT INTO t VALUES ({number}) ON CONFLICT DO NOTHING")
            async with CatalogConnection.open(target.dsn(), "status") as catalog:
                look = await read_catalog(catalog)
            statuses = [assess(subscription, look, PublisherAnswer()) for subscription in look.subscriptions]
            assert json.loads(to_json(look, statuses))
            assert "publications" in to_text(look, statuses)
            await target.execute(f"DELETE FROM subscriber.subscription WHERE subid = {OWN}")
    assert "subonerror" in refused
    assert not attacked.subscriber.log.has("unexpected error")


@pytest.mark.parametrize("target", SINCE_16, indirect=True, scope="session")
async def test_a_member_without_rights_sees_no_subscription(owners: Attacked) -> None:
    """Since 16 a membership can give neither rights nor SET ROLE. Operators of the member are not found."""
    target = owners.target
    await target.execute(f"GRANT {OTHER} TO {OWNER} WITH INHERIT FALSE, SET FALSE")
    await owners.as_owner(
        "CREATE FUNCTION app.never(int4, int4) RETURNS bool LANGUAGE sql AS 'SELECT false'",
        "CREATE OPERATOR app.>= (FUNCTION = app.never, LEFTARG = int4, RIGHTARG = int4)",
    )
    seen = f"SELECT subname FROM subscriber.subscription WHERE subid = {VICTIM}"
    progress = f"SELECT remote_lsn FROM subscriber.progress WHERE subid = {VICTIM}"
    async with target.connection() as connection:
        await connection.execute(f"SET SESSION AUTHORIZATION {OWNER}")
        assert await connection.fetch(seen) == await connection.fetch(progress) == []
        await connection.execute("SET search_path = app, pg_catalog")
        assert await connection.fetch(seen) == await connection.fetch(progress) == []
        await connection.execute("RESET SESSION AUTHORIZATION")
        await connection.execute(f"GRANT {OTHER} TO {OWNER} WITH SET TRUE")
        await connection.execute(f"SET SESSION AUTHORIZATION {OWNER}")
        assert len(await connection.fetch(seen)) == len(await connection.fetch(progress)) == 1


async def test_an_owner_hands_on_a_subscription_as_postgresql_allows_it(owners: Attacked) -> None:
    """CREATE on the database is needed, and no superuser's terms are handed on."""
    target = owners.target
    hand_on = f"SELECT subscriber.set_owner({OWN}, '{OTHER}'::regrole)"
    await target.execute(f"GRANT {OTHER} TO {OWNER}")
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="permission denied for database"):
        await owners.as_owner(hand_on)
    await target.execute(
        f"GRANT CREATE ON DATABASE {target.name} TO {OWNER}",
        f"UPDATE subscriber.subscription SET subpasswordrequired = false WHERE subid = {OWN}",
    )
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="password_required=false is superuser-only"):
        await owners.as_owner(hand_on)
    await target.execute(f"UPDATE subscriber.subscription SET subpasswordrequired = true WHERE subid = {OWN}")
    await owners.as_owner(hand_on)
    assert await target.value(f"SELECT subownername FROM subscriber.subscription WHERE subid = {OWN}") == OTHER


async def test_a_worker_that_was_replaced_learns_it_from_each_function(owners: Attacked) -> None:
    """Also if nothing is recorded about the prepared transaction that it asks for."""
    target = owners.target
    async with target.connection() as connection:
        former = await connection.fetchrow(f"SELECT * FROM subscriber.claim_progress({OWN}, 0)")
        await connection.execute(f"SELECT subscriber.claim_progress({OWN}, 0)")
        assert former is not None
        for function in ("find_prepared", "forget_prepared"):
            with pytest.raises(asyncpg.PostgresError) as caught:
                await connection.execute(
                    f"SELECT subscriber.{function}({former['record']}::oid, '\\x{former['fence'].hex()}', 7)"
                )
            assert caught.value.sqlstate == "SB002"
