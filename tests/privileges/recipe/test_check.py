"""`subscriber check` with exactly the roles of the recipe: its fixes work, and ask for no right that is too much."""

from __future__ import annotations

import json
import os
import re
import subprocess
from asyncio import to_thread
from typing import Any

import pytest

from subscriber.demo.servers import embedded_bin
from tests.privileges.recipe.scene import CURRENT, CURRENT_AND_OLD_IN_SOAKS, OWNER, PUBLISHER, Scene, named

pytestmark = pytest.mark.xdist_group("recipe")

PAIRS = [*CURRENT, *(pytest.param(pair, marks=pytest.mark.soak) for pair in ((13, 14), (15, 15), (16, 16)))]


async def problems(scene: Scene, *arguments: str) -> list[dict[str, Any]]:
    """Return the findings of `subscriber check` that are not ok."""
    done = await scene.as_recipe("check", "--json", *arguments)
    return [finding for finding in json.loads(done.stdout) if finding["level"] != "ok"]


def as_publisher(scene: Scene) -> tuple[str, ...]:
    return ("--source", scene.dsn_file(PUBLISHER, scene.source), "--publication", "p")


def in_a_shell(scene: Scene, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of a hint as an administrator of both servers."""
    dsns = {"SOURCE": scene.source.dsn(), "TARGET": scene.target.dsn()}
    path = f"{embedded_bin()}:{os.environ['PATH']}"
    return subprocess.run(
        ["sh", "-c", command], env={**os.environ, **dsns, "PATH": path}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("majors", PAIRS, indirect=True, ids=named)
async def test_no_fix_makes_a_role_a_superuser(scene: Scene) -> None:
    await scene.streaming()
    await scene.source.execute(
        "CREATE TABLE app.other (id int PRIMARY KEY)",
        "ALTER PUBLICATION p ADD TABLE app.other",
        f"GRANT SELECT ON app.other TO {PUBLISHER}",
    )
    await scene.target.execute("CREATE TABLE app.other (id int PRIMARY KEY)")  # it belongs to a superuser
    assert (await scene.as_recipe("exec", "ALTER SUBSCRIPTION s REFRESH PUBLICATION")).returncode == 0, scene.said
    new = await problems(scene, *as_publisher(scene))
    old = await problems(scene, "s")
    fixes = [finding["fix"] for finding in (*new, *old) if finding["fix"]]
    assert fixes
    for fix in fixes:
        assert re.search(r"\bSUPERUSER\b", fix) is None, fix
        assert 'GRANT "postgres"' not in fix
    assert {finding["subject"] for finding in old} == {"table app.other"}
    commands = {finding["fix_command"] for finding in old}
    assert commands == {f'ALTER TABLE "app"."other" OWNER TO "{OWNER}";'}
    await scene.target.execute(*commands)
    await scene.target.wait_for("SELECT bool_and(srsubstate IN ('s', 'r')) FROM subscriber.subscription_rel")
    assert await problems(scene, "s") == []
    if scene.majors[1] >= 16:
        assert {finding["subject"] for finding in await problems(scene, *as_publisher(scene))} <= {
            "table app.orders",
            "table app.other",
        }  # they have rows


@pytest.mark.parametrize("majors", PAIRS, indirect=True, ids=named)
async def test_a_table_that_is_missing_gets_an_owner_whom_changes_are_applied_as(scene: Scene) -> None:
    await scene.streaming()
    await scene.source.execute(
        "CREATE TABLE app.more (id int PRIMARY KEY)",
        "INSERT INTO app.more VALUES (1), (2)",
        "CREATE SCHEMA second",
        'CREATE TABLE second."it\'s" (id int PRIMARY KEY)',
        'ALTER PUBLICATION p ADD TABLE app.more, second."it\'s"',
        f"GRANT SELECT ON app.more TO {PUBLISHER}",
        f"GRANT USAGE ON SCHEMA second TO {PUBLISHER}",
        f'GRANT SELECT ON second."it\'s" TO {PUBLISHER}',
    )
    missing = [
        problem for problem in await problems(scene, "s") if problem["message"] == "does not exist on the target"
    ]
    assert [finding["subject"] for finding in missing] == ["table app.more", "table second.it's"]
    refresh = ("exec", "ALTER SUBSCRIPTION s REFRESH PUBLICATION")
    said = (await scene.as_recipe(*refresh)).stderr
    assert missing[0]["fix_command"] in said
    done = [await to_thread(in_a_shell, scene, finding["fix_command"]) for finding in missing]
    assert "denied" not in "".join(shell.stderr for shell in done)
    owners = "SELECT DISTINCT tableowner::text FROM pg_tables WHERE tablename IN ('more', 'it''s')"
    assert await scene.target.rows(owners) == [(OWNER,)]
    (closed,) = [text for text in (await scene.as_recipe(*refresh)).stderr.splitlines() if text.startswith("HINT")]
    await scene.paste(closed)
    assert (await scene.as_recipe(*refresh)).returncode == 0, scene.said
    await scene.target.wait_for("SELECT count(*) FROM app.more", 2)
    await scene.target.wait_for("SELECT bool_and(srsubstate IN ('s', 'r')) FROM subscriber.subscription_rel")
    assert await problems(scene, "s") == []


@pytest.mark.parametrize("majors", PAIRS, indirect=True, ids=named)
async def test_changes_are_applied_as_the_owner_of_the_subscription(scene: Scene) -> None:
    """With run_as_owner the apply role owns the subscription. The launcher cannot: the other one is its member."""
    await scene.streaming()
    alter = "ALTER SUBSCRIPTION s SET (run_as_owner = true)"
    assert (await scene.as_recipe("exec", alter)).returncode == 0, scene.said
    table, sequence = await problems(scene, "s")
    assert table["message"].endswith(
        'may not act as role "subscriber_launcher", which owns the subscription (run_as_owner)'
    )
    assert sequence["message"] == 'role "subscriber_launcher", which sets it on the target, lacks UPDATE'
    await scene.source.execute("INSERT INTO app.orders VALUES (200, 200)")
    await scene.says('permission denied to set role "subscriber_launcher"')
    assert "Find the missing privilege: subscriber check s" in (await scene.as_recipe("status", "s")).stdout
    assert await scene.administrators(await scene.recipe("s")), scene.said
    await scene.source.wait_for_catchup("s")
    assert await scene.target.value("SELECT who FROM app.seen WHERE id = 200") == "subscriber_apply"
    assert await problems(scene, "s") == []
    assert (await scene.as_recipe("verify", "s")).returncode == 0, scene.said


@pytest.mark.parametrize("majors", CURRENT, indirect=True, ids=named)
async def test_a_privilege_that_the_owner_of_a_table_lacks(scene: Scene) -> None:
    await scene.streaming()
    await scene.target.execute(f"REVOKE INSERT, TRUNCATE ON app.orders FROM {OWNER}")
    (problem,) = await problems(scene, "s")
    assert problem["message"] == f'role "{OWNER}", as which changes are applied, lacks INSERT, TRUNCATE'
    await scene.target.execute(problem["fix_command"])
    assert await problems(scene, "s") == []


OF_ANOTHER = [
    ("status", "s"),
    ("verify", "s"),
    ("repair", "s"),
    ("repair", "s", "--history"),
    ("resync", "s", "app.orders"),
    ("reseed", "s"),
    ("check", "s"),
    ("quarantine", "list", "s"),
    ("exec", "ALTER SUBSCRIPTION s DISABLE"),
    ("exec", "DROP SUBSCRIPTION s"),
]


READING = {("status", "s"), ("verify", "s"), ("repair", "s"), ("reseed", "s"), ("check", "s")}  # also for a member


@pytest.mark.parametrize("majors", CURRENT, indirect=True, ids=named)
async def test_a_subscription_of_another_role(scene: Scene) -> None:
    """Of a superuser, or of a role that the launcher may become, and does not inherit from."""
    await scene.streaming()
    as_superuser = ("exec", "--target", scene.target.dsn())
    for owner in ("postgres", OWNER):
        alter = f"ALTER SUBSCRIPTION s OWNER TO {owner}"
        assert (await scene.subscriber(*as_superuser, alter)).returncode == 0, scene.said
        visible = owner == OWNER
        for arguments in OF_ANOTHER:
            if visible and arguments in READING:
                continue
            done = await scene.as_recipe(*arguments)
            assert done.returncode == 3, (arguments, done.stderr)
            assert "must be owner of subscription s" in done.stderr, (arguments, done.stderr)
            assert f'belongs to role "{owner}" of the target' in done.stderr
        if visible:
            (problem,) = await problems(scene, "s")
            assert problem["message"] == (
                f'role "subscriber_launcher" may not run the subscription, which belongs to role "{OWNER}"'
            )
            assert f'GRANT "{OWNER}" TO "subscriber_launcher";' in problem["fix"]
        else:
            (statement,) = {*re.findall(r"with subscriber exec: (ALTER .*;)$", scene.said, re.MULTILINE)}
            assert (await scene.subscriber(*as_superuser, statement)).returncode == 0, scene.said
            assert (await scene.as_recipe("status", "s")).returncode in (0, 1), scene.said


@pytest.mark.parametrize("majors", CURRENT_AND_OLD_IN_SOAKS, indirect=True, ids=named)
async def test_the_launcher_does_not_run_a_subscription_that_it_may_not_change(scene: Scene) -> None:
    """It sees the subscription of an owner whom it may become. `disable_on_error` cannot disable it either."""
    await scene.streaming(disable_on_error="true")
    alter = f"ALTER SUBSCRIPTION s OWNER TO {OWNER}"
    assert (await scene.subscriber("exec", "--target", scene.target.dsn(), alter)).returncode == 0, scene.said
    await scene.program.wait_for("ERROR:  must be owner of subscription s")
    begun = scene.program.text.count("apply worker for subscription")
    status = await scene.as_recipe("status", "s")
    grant = f'GRANT "{OWNER}" TO "subscriber_launcher";'
    assert (status.returncode, "must be owner of subscription s" in status.stdout, grant in status.stdout) == (
        1,
        True,
        True,
    ), scene.said
    assert "disabled because of an error" not in status.stdout + scene.program.text
    every = await scene.as_recipe("verify", "--all")
    assert (every.returncode, "must be owner of subscription s" in every.stdout, grant in every.stdout) == (
        1,
        True,
        True,
    )
    await scene.target.execute(grant)
    await scene.source.execute("INSERT INTO app.orders VALUES (200, 200)")
    await scene.source.wait_for_catchup("s")
    assert scene.program.text.count("ERROR:  must be owner") < 20, begun
    assert await problems(scene, "s") == []
