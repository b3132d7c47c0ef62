"""A target whose role cannot set session_replication_role: ordinary triggers fire a second time there."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import pytest

from subscriber import MoveOptions, StartOptions, StatementError, SubscriberError, move_database
from subscriber.demo.servers import Servers, embedded_bin
from subscriber.migration.migration import Migration
from subscriber.migration.plan import Side
from subscriber.migration.preflight.preflight import run_preflight
from tests.migration.scene import QUICK
from tests.migration.test_managed_service import sides_of

SCHEMA = (
    "CREATE TABLE t (id int PRIMARY KEY, v text)",
    "CREATE FUNCTION append() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.v := NEW.v || 't'; RETURN NEW; END $$",
    "CREATE TRIGGER append BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION append()",
    "CREATE TABLE calm (id int PRIMARY KEY)",
)


@pytest.mark.timeout(300)
async def test_tables_whose_triggers_fire_again_are_compared_or_waived(servers: Servers) -> None:
    sides = await sides_of(servers, 18, 18)
    source, target = sides.values()
    await source.execute("SET ROLE mover; " + "; ".join(SCHEMA))
    dsns = [database.dsn(user="mover", password="moving") for database in (source, target)]
    for error in (await run_preflight(*dsns, programs=embedded_bin())).errors:
        await sides[error.fixed_on].execute(str(error.fix))
    preflight = await run_preflight(*dsns, programs=embedded_bin())
    (warning,) = [finding for finding in preflight.findings if finding.kind == "trigger"]
    assert warning.name == "trigger:public.t"
    assert warning.message.endswith("changes: append")
    assert warning.fix == 'GRANT SET ON PARAMETER session_replication_role TO "mover";'

    def moving(options: MoveOptions = QUICK) -> AbstractAsyncContextManager[Migration]:
        return move_database(dsns[0], dsns[1], "s", options=options)

    async with moving() as move:
        await move.start(StartOptions(programs=embedded_bin()))
        await move.verify()
        await source.execute("INSERT INTO t VALUES (1, 'w')")
        await target.wait_for("SELECT v FROM t", "wtt")
        with pytest.raises(StatementError, match="applications cannot move yet") as refused:
            await move.cutover()
        assert "Triggers or rules of table public.t fire again on the target" in str(refused.value.detail)
        assert "calm" not in str(refused.value.detail)
        with pytest.raises(SubscriberError, match="tables differ"):
            await move.verify()
    for options in (replace(QUICK, verified_within=600.0), replace(QUICK, verify=True)):
        async with moving(options) as move:
            with pytest.raises(SubscriberError):
                await move.cutover()
    async with moving(replace(QUICK, waive=("trigger:public.t",))) as move:
        assert (await move.cutover()).serving is Side.TARGET
    # On the old server, too, the trigger fires for changes of the new one.
    async with moving() as move:
        with pytest.raises(StatementError, match="applications cannot move yet"):
            await move.back()
