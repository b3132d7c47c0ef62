"""Comparison and repair with exactly the roles of the recipe: no role may read a table of the target itself."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.privileges.recipe.scene import (
    CURRENT,
    CURRENT_AND_OLD_IN_SOAKS,
    LAUNCHER,
    OWNER,
    PUBLISHER,
    Scene,
    named,
)

pytestmark = pytest.mark.xdist_group("recipe")

PARTITIONED = """
CREATE TABLE app.days (day int, v text, PRIMARY KEY (day)) PARTITION BY RANGE (day);
CREATE TABLE app.days_1 PARTITION OF app.days FOR VALUES FROM (1) TO (51);
CREATE TABLE app.days_2 PARTITION OF app.days FOR VALUES FROM (51) TO (101);
"""
OTHER = "app_other"  # owns a partition


async def with_partitions(scene: Scene) -> None:
    """Publish a partitioned table as one, whose partitions have two owners on the target."""
    await scene.source.execute(
        PARTITIONED,
        "INSERT INTO app.days SELECT g, g FROM generate_series(1, 100) g",
        "ALTER PUBLICATION p ADD TABLE app.days",
        "ALTER PUBLICATION p SET (publish_via_partition_root)",
    )
    await scene.target.execute(f"SET ROLE {OWNER}; {PARTITIONED}")


async def verified(scene: Scene, *options: str) -> dict[str, Any]:
    """Return the result of each table, by name."""
    done = await scene.as_recipe("verify", "s", "--json", *options)
    assert done.stderr == ""
    return {table["table"]: table for table in json.loads(done.stdout)["tables"]}


@pytest.mark.parametrize("majors", CURRENT_AND_OLD_IN_SOAKS, indirect=True, ids=named)
async def test_the_role_that_applies_changes_reads_the_tables(scene: Scene) -> None:
    await with_partitions(scene)
    await scene.streaming()
    damage = ("DELETE FROM app.orders WHERE id <= 3", "UPDATE app.days SET v = 'other' WHERE day IN (7, 77)")
    await scene.target.execute(*damage)
    comparison = await verified(scene)
    assert {name: (table["note"], table["missing"], table["changed"]) for name, table in comparison.items()} == {
        "app.orders": (None, 3, 0),
        "app.days": (None, 0, 2),
    }
    dry = await scene.as_recipe("repair", "s", "--dry-run")
    assert dry.stdout.count("INSERT INTO") == 3, scene.said
    repaired = await scene.as_recipe("repair", "s")
    assert (repaired.returncode, "5 rows repaired" in repaired.stdout) == (0, True), scene.said
    await scene.target.execute(*damage)
    again = await scene.as_recipe("resync", "s", "app.orders", "app.days")
    assert (again.returncode, again.stdout.count("synchronized")) == (0, 2), scene.said
    await scene.target.execute(*damage)
    new = await scene.as_recipe("reseed", "s")
    assert (new.returncode, "5 rows repaired" in new.stdout) == (0, True), scene.said
    every = await scene.as_recipe("verify", "--all")
    assert (every.returncode, "identical" in every.stdout) == (0, True), scene.said


@pytest.mark.parametrize("majors", CURRENT, indirect=True, ids=named)
async def test_each_partition_is_read_as_its_owner(scene: Scene) -> None:
    await with_partitions(scene)
    await scene.target.execute(f"CREATE ROLE {OTHER}")
    try:
        await scene.target.execute(f"ALTER TABLE app.days_2 OWNER TO {OTHER}", f"GRANT USAGE ON SCHEMA app TO {OTHER}")
        await scene.streaming()
        note = (await verified(scene))["app.days"]["note"]
        assert note == 'role "subscriber_apply" may not read it on the target'
        await scene.target.execute(f"GRANT {OTHER} TO subscriber_apply WITH INHERIT FALSE")
        assert (await verified(scene))["app.days"]["same"]
    finally:
        await scene.target.execute("DROP TABLE app.days", f"DROP OWNED BY {OTHER}", f"DROP ROLE {OTHER}")


REFUSED = {
    "no SELECT on the publisher": (
        "publisher",
        f"REVOKE SELECT ON app.orders FROM {PUBLISHER}",
        f'role "{PUBLISHER}" may not read it on the publisher',
    ),
    "row security on the publisher": (
        "publisher",
        "ALTER TABLE app.orders ENABLE ROW LEVEL SECURITY",
        f'row-level security of app.orders on the publisher hides rows from role "{PUBLISHER}"',
    ),
    "an owner without SELECT": (
        "target",
        f"REVOKE SELECT ON app.orders FROM {OWNER}",
        f'role "{OWNER}" may not read it on the target',
    ),
    "row security on the target": (
        "target",
        "ALTER TABLE app.orders ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY",
        f'row-level security of app.orders on the target hides rows from role "{OWNER}"',
    ),
}


@pytest.mark.parametrize("majors", CURRENT, indirect=True, ids=named)
async def test_a_table_that_cannot_be_read_is_named_with_side_role_and_command(scene: Scene) -> None:
    await scene.source.execute("CREATE TABLE app.other (id int PRIMARY KEY)", "ALTER PUBLICATION p ADD TABLE app.other")
    await scene.target.execute(f"SET ROLE {OWNER}; CREATE TABLE app.other (id int PRIMARY KEY)")
    await scene.streaming()
    for side, statement, problem in REFUSED.values():
        await (scene.source if side == "publisher" else scene.target).execute(statement)
        done = await scene.as_recipe("verify", "s")
        assert (done.returncode, f"app.orders: not compared, {problem}" in done.stdout) == (1, True), scene.said
        assert "same       app.other" in done.stdout
        repaired = await scene.as_recipe("repair", "s")
        assert (repaired.returncode, problem in repaired.stdout) == (1, True), scene.said
        again = await scene.as_recipe("resync", "s", "app.orders")
        assert (again.returncode, problem in again.stderr) == (1, True), scene.said
        hints = [
            re.findall(r"HINT:  (On the .*;)$", text, re.MULTILINE)[-1]
            for text in (done.stdout, repaired.stdout, again.stderr)
        ]
        assert len({*hints}) == 1
        await scene.paste(done.stdout)
        await scene.target.wait_for("SELECT bool_and(srsubstate IN ('s', 'r')) FROM subscriber.subscription_rel")
        assert (await scene.as_recipe("verify", "s")).returncode == 0, scene.said


@pytest.mark.parametrize("majors", CURRENT, indirect=True, ids=named)
async def test_a_session_with_more_rights_reads_no_table_with_code_of_others(scene: Scene) -> None:
    """The launcher may act as the owner. The owner's code could use the launcher's rights then."""
    await scene.streaming()
    launcher = scene.dsn_file(LAUNCHER, scene.target)
    done = await scene.subscriber("verify", "s", "--target", launcher)
    assert (done.returncode, f'run code of role "{OWNER}"' in done.stdout) == (1, True), scene.said
    await scene.target.execute("DROP TRIGGER note ON app.orders")
    done = await scene.subscriber("verify", "s", "--target", launcher)
    assert (done.returncode, "identical" in done.stdout) == (0, True), scene.said
