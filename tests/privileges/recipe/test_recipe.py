"""The recipe of least privilege, exactly as printed: a subscription works with it, and fails without any step."""

from __future__ import annotations

import json
import re
from asyncio import to_thread
from pathlib import Path
from typing import Any

import pytest

from subscriber.display import sql_literal
from subscriber.targets.postgres.session.capabilities import WITHOUT_ORIGINS, WITHOUT_REPLICA_ROLE
from tests.plugins.fix_subscriber import Program, Subscriptions
from tests.privileges.recipe.scene import (
    ADMIN,
    APPLY,
    CURRENT,
    CURRENT_AND_OLD_IN_SOAKS,
    LAUNCHER,
    OWNER,
    PAIRS,
    PASSWORDS,
    PUBLISHER,
    Scene,
    named,
    of_new,
)

pytestmark = pytest.mark.xdist_group("recipe")  # each process would start the servers


@pytest.mark.parametrize(
    "majors",
    [*(pytest.param(pair, marks=pytest.mark.soak) for pair in PAIRS[:-1]), PAIRS[-1]],
    indirect=True,
    ids=named,
)
async def test_the_recipe_leads_from_an_empty_server_to_a_stream(scene: Scene) -> None:
    assert await scene.administrators(await of_new(scene)), scene.said
    assert await scene.create(), scene.said
    await scene.run()
    await scene.streams()
    who = (
        "SELECT usename::text, usesuper FROM pg_stat_activity JOIN pg_user USING (usename) WHERE application_name LIKE"
    )
    sessions = set(await scene.target.rows(f"{who} 'subscriber%' AND datname = current_database()"))
    assert sessions == {(LAUNCHER, False), (APPLY, False)}
    assert set(await scene.source.rows(f"{who} 's'")) == {(PUBLISHER, False)}
    assert await scene.target.value("SELECT subowner::regrole::text FROM subscriber.subscription") == LAUNCHER
    assert (await Subscriptions(scene.target).worker())["limits"] is None
    again = await of_new(scene)
    assert "\\password" not in again
    assert await scene.administrators(again), scene.said
    assert "WARNING" not in scene.program.text


# Side and key of a step -> a command's error without it.
LOST = {
    ("target", "schema"): 'schema "subscriber" does not exist',
    ("target", "launcher"): f'role "{LAUNCHER}" does not exist',
    ("target", "apply"): f'role "{APPLY}" does not exist',
    ("target", "connect"): "permission denied for database",
    ("target", "admit launcher"): "permission denied to run subscriptions on this database",
    ("target", "admit apply"): "permission denied for function register_own_session",
    ("target", "creation"): "permission denied to create subscription",
    ("target", "database"): "permission denied for database",
    ("target", f"apply as {OWNER}"): f'role "{LAUNCHER}" cannot SET ROLE to "{OWNER}"',
    ("target", "launcher as apply"): f'role "{LAUNCHER}" cannot SET ROLE to',
    ("target", "schemas"): "permission denied for schema app",
    ("publisher", "role"): f'role "{PUBLISHER}" does not exist',
    ("publisher", "connect"): "permission denied for database",
    ("publisher", "replication"): "could not connect to the publisher",
    ("publisher", "schemas"): "permission denied for schema app",
    ("publisher", "tables"): "permission denied for table orders",
    ("publisher", "sequences"): 'insufficient privileges on publisher sequence ("app.orders_v_seq")',
}  # fmt: skip
ELSEWHERE = {("target", "reserved connections")}
# The others take as long, and are for the soak.
ALWAYS = [("target", "admit launcher")]
LATER = [step for step in LOST if step not in ALWAYS]


def without(recipe: str, side: str, key: str, steps: list[dict[str, Any]]) -> str:
    """Return the printed recipe without one step."""
    (step,) = [step for step in steps if (step["side"], step["key"]) == (side, key)]
    blocks = recipe.split("\n\n")
    start = 1 + next(number for number, block in enumerate(blocks) if f"the {side}, PostgreSQL" in block)
    place = start + [each for each in steps if each["side"] == side].index(step)
    assert blocks[place].splitlines()[1] == f"-- Without it: {step['without']}."
    return "\n\n".join([*blocks[:place], *blocks[place + 1 :]])


async def steps_of(scene: Scene, *options: str) -> list[dict[str, Any]]:
    document: list[dict[str, Any]] = json.loads(await scene.recipe("--json", *options))["steps"]
    return document


@pytest.mark.parametrize("majors", CURRENT_AND_OLD_IN_SOAKS, indirect=True, ids=named)
@pytest.mark.parametrize(
    ("side", "key"), [*ALWAYS, *(pytest.param(*step, marks=pytest.mark.soak) for step in LATER)], ids=str
)
async def test_each_step_of_the_recipe_is_necessary_as_described(scene: Scene, side: str, key: str) -> None:
    given = ("--source", scene.source.dsn(), "--publication", "p")
    for database in (scene.source, scene.target):
        await database.execute(f"REVOKE CONNECT ON DATABASE {database.name} FROM PUBLIC")
    steps = await steps_of(scene, *given)
    if scene.majors[1] < 16 and key in ("creation", "database"):
        assert key not in {step["key"] for step in steps}  # a superuser does it
        return
    lost = LOST[side, key]
    assert [lost in step["without"] for step in steps if (step["side"], step["key"]) == (side, key)] == [True]
    await scene.administrators(without(await of_new(scene), side, key, steps))
    await scene.create()
    await scene.run()
    # Before 16 a superuser has created it, and needs no privilege for that.
    refresh = "ALTER SUBSCRIPTION s REFRESH PUBLICATION"
    await scene.subscriber("exec", "--target", scene.dsn_file(LAUNCHER, scene.target), refresh)
    await scene.says(lost)


@pytest.mark.parametrize("majors", CURRENT, indirect=True, ids=named)
async def test_every_step_has_a_test(scene: Scene) -> None:
    for database in (scene.source, scene.target):
        await database.execute(f"REVOKE CONNECT ON DATABASE {database.name} FROM PUBLIC")
    given = ("--source", scene.source.dsn(), "--publication", "p")
    step_keys = {(step["side"], step["key"]) for step in await steps_of(scene, *given)}
    assert step_keys - ELSEWHERE == LOST.keys()


@pytest.mark.parametrize("majors", CURRENT, indirect=True, ids=named)
async def test_the_launcher_ends_a_session_that_blocks(scene: Scene) -> None:
    """A session of the apply role, in a deadlock that no server sees."""
    await scene.source.stream_everything()
    assert await scene.administrators(await of_new(scene))
    await scene.target.execute("CREATE UNIQUE INDEX here_only ON app.orders (v) WHERE id > 1000")
    await scene.create(streaming="parallel")
    await scene.run()
    await scene.streams()
    connection = await scene.source.connect()
    await connection.execute("BEGIN; INSERT INTO app.orders VALUES (2000, 1)")
    await scene.source.flush_wal()
    await scene.target.wait_for("SELECT (streamed->0->>'worker') FROM subscriber.worker WHERE relid = 0", "1")
    await scene.source.execute("INSERT INTO app.orders VALUES (3000, 1)")
    await scene.program.wait_for("ERROR:  deadlock detected")
    await scene.target.wait_for("SELECT count(*) FROM app.orders WHERE id = 3000", 1)
    await connection.execute("DELETE FROM app.orders WHERE id = 2000; COMMIT")
    await scene.target.execute("DROP INDEX app.here_only")
    await scene.source.wait_for_catchup("s")
    assert "permission denied" not in scene.program.text


@pytest.mark.parametrize("majors", CURRENT, indirect=True, ids=named)
async def test_the_launcher_rolls_back_what_the_apply_role_has_prepared(scene: Scene) -> None:
    assert await scene.administrators(await of_new(scene))
    await scene.create()
    await scene.run()
    await scene.streams()
    await scene.target.execute("CREATE UNIQUE INDEX here_only ON app.orders (v) WHERE id > 1000")
    await scene.source.execute("BEGIN; INSERT INTO app.orders VALUES (2000, 1); PREPARE TRANSACTION 'g'")
    await scene.target.wait_for("SELECT count(*) FROM pg_prepared_xacts", 1)
    await scene.source.execute("INSERT INTO app.orders VALUES (3000, 1)")
    await scene.program.wait_for('a lock that is needed is held by prepared transaction "pg_gid')
    await scene.source.execute("ROLLBACK PREPARED 'g'")
    await scene.program.wait_for("is in the way, and rolled back as on the publisher")
    await scene.source.wait_for_catchup("s")
    assert await scene.target.value("SELECT count(*) FROM app.orders WHERE id = 3000") == 1
    assert "permission denied" not in scene.program.text


# --- subscriptions that are there, and a target without a superuser ---------------------------------


@pytest.mark.parametrize("majors", CURRENT_AND_OLD_IN_SOAKS, indirect=True, ids=named)
async def test_a_subscription_of_a_superuser_changes_hands(scene: Scene) -> None:
    """The recipe for an existing subscription that has been streaming with rights that it does not need."""
    await scene.source.execute(f"CREATE ROLE {PUBLISHER} LOGIN PASSWORD {sql_literal(PASSWORDS[PUBLISHER])}")
    await scene.target.execute("ALTER TABLE app.orders DISABLE TRIGGER note")
    secret = Path(scene.dsn_file(PUBLISHER, scene.source)[1:]).read_text().replace("'", "''")
    await scene.source.execute(
        f"ALTER ROLE {PUBLISHER} REPLICATION",
        f"GRANT USAGE ON SCHEMA app TO {PUBLISHER}",
        f"GRANT SELECT ON app.orders TO {PUBLISHER}",
    )
    create = f"CREATE SUBSCRIPTION s CONNECTION '{secret}' PUBLICATION p"
    assert (await scene.subscriber("exec", "--target", scene.target.dsn(), create)).returncode == 0, scene.said
    as_superuser = Program(scene.target.dsn(), scene.folder / "superuser.log")
    try:
        await as_superuser.start()
        await scene.target.wait_for("SELECT count(*) > 0 FROM subscriber.pg_subscription_rel WHERE srsubstate = 'r'")
    finally:
        as_superuser.kill()
    printed = await scene.recipe("s")
    assert 'ALTER SUBSCRIPTION "s" OWNER TO "subscriber_launcher"' in printed
    assert "pg_create_subscription" not in printed
    assert await scene.administrators(printed), scene.said
    await scene.target.execute("ALTER TABLE app.orders ENABLE ALWAYS TRIGGER note")
    await scene.run()
    await scene.source.execute("INSERT INTO app.orders VALUES (200, 200)")
    await scene.source.wait_for_catchup("s")
    assert await scene.target.rows("SELECT * FROM app.seen") == [(200, OWNER)]


@pytest.mark.parametrize("majors", CURRENT_AND_OLD_IN_SOAKS, indirect=True, ids=named)
async def test_a_target_without_a_superuser(scene: Scene) -> None:
    """As on a managed service: an administrator without SUPERUSER owns schema subscriber and runs the launcher."""
    await scene.target.execute(
        f"CREATE ROLE {ADMIN} LOGIN CREATEROLE PASSWORD '{PASSWORDS[ADMIN]}'",
        f"GRANT {OWNER} TO {ADMIN} WITH ADMIN OPTION",
        f"GRANT CREATE ON DATABASE {scene.target.name} TO {ADMIN}",
        "ALTER TABLE app.orders ENABLE TRIGGER note",  # an ordinary trigger
    )
    if scene.majors[1] >= 16:
        await scene.target.execute(f"GRANT pg_create_subscription TO {ADMIN}")
    mine = scene.target.dsn(user=ADMIN)
    assert (await scene.subscriber("exec", "--target", mine, "")).returncode == 0, scene.said
    given = ("check", "--fix", "--target", mine, "--source", scene.source.dsn(), "--publication", "p")
    printed = (await scene.subscriber(*given)).stdout
    _, of_target, of_publisher = printed.split("-- Least privilege for subscriber: ")
    assert await to_thread(scene.psql, scene.source, f"-- {of_publisher}")
    assert await to_thread(scene.psql, scene.target, f"-- {of_target}", ADMIN), scene.said
    secret = Path(scene.dsn_file(PUBLISHER, scene.source)[1:]).read_text().replace("'", "''")
    create = f"CREATE SUBSCRIPTION s CONNECTION '{secret}' PUBLICATION p"
    assert (await scene.subscriber("exec", "--target", mine, create)).returncode == 0, scene.said
    options = ["--apply-target", scene.dsn_file(APPLY, scene.target)]
    scene.program = Program(scene.dsn_file(ADMIN, scene.target), scene.folder / "own.log", options=options)
    await scene.run()
    await scene.target.wait_for("SELECT string_agg(srsubstate::text, '') FROM subscriber.subscription_rel", "r")
    assert WITHOUT_ORIGINS in printed
    assert f"WARNING:  {WITHOUT_ORIGINS}" in scene.program.text
    assert f"WARNING:  {WITHOUT_REPLICA_ROLE}" in scene.program.text
    (grant,) = re.findall(r"a superuser grants this: (GRANT SET ON PARAMETER [^;]*;)", printed)
    scene.program.kill()
    before = await scene.target.value("SELECT count(*) FROM app.seen")
    await scene.target.execute(grant)
    seen = len(scene.program.text)
    await scene.run()
    await scene.source.execute("INSERT INTO app.orders VALUES (200, 200)")
    await scene.source.wait_for_catchup("s")
    assert WITHOUT_REPLICA_ROLE not in scene.program.text[seen:]
    assert await scene.target.value("SELECT count(*) FROM app.seen") == before


# --- executed by the program ------------------------------------------------------------------------


def secrets_of(text: str) -> list[str]:
    """Return the passwords in connection strings."""
    return re.findall(r"password=([\w-]+)", text)


@pytest.mark.parametrize("majors", CURRENT, indirect=True, ids=named)
async def test_the_program_executes_the_targets_part(scene: Scene) -> None:
    await scene.target.execute(f"ALTER DATABASE {scene.target.name} SET log_statement = 'all'")
    given = ("check", "--fix", "--target", scene.target.dsn(), "--source", scene.source.dsn(), "--publication", "p")
    folder = scene.folder / "credentials"
    done = await scene.subscriber(*given, "--execute", "--credentials", str(folder))
    assert done.returncode == 0, done.stderr
    assert "the target" not in done.stdout
    files = {file.name: file for file in folder.iterdir()}
    assert {(name, file.stat().st_mode & 0o777) for name, file in files.items()} == {
        ("launcher", 0o600),
        ("apply", 0o600),
    }
    assert folder.stat().st_mode & 0o777 == 0o700
    passwords = [secret for file in files.values() for secret in secrets_of(file.read_text())]
    assert len({*passwords}) == 2
    log = scene.target.server.log.read_text()
    assert "SCRAM-SHA-256$4096:" in log
    for password in passwords:
        assert len(password) == 32
        assert password not in done.stdout + done.stderr + log
    assert await to_thread(scene.psql, scene.source, done.stdout)
    scene.program = Program(
        f"@{files['launcher']}", scene.folder / "own.log", options=["--apply-target", f"@{files['apply']}"]
    )
    await scene.run()
    secret = Path(scene.dsn_file(PUBLISHER, scene.source)[1:]).read_text().replace("'", "''")
    create = f"CREATE SUBSCRIPTION s CONNECTION '{secret}' PUBLICATION p WITH (two_phase)"
    assert (await scene.subscriber("exec", "--target", f"@{files['launcher']}", create)).returncode == 0, scene.said
    await scene.streams()
    scene.program.kill()
    again = await scene.subscriber(*given, "--execute", "--credentials", str(folder))
    assert again.returncode == 0, again.stderr
    assert f'role "{LAUNCHER}" keeps its password' in again.stderr
    assert (await scene.subscriber("status", "--target", f"@{files['launcher']}")).stdout.startswith("s")


@pytest.mark.parametrize("majors", CURRENT, indirect=True, ids=named)
async def test_connection_strings_are_printed_once_where_no_file_is_named(scene: Scene) -> None:
    given = ("check", "--fix", "--execute", "--target", scene.target.dsn())
    done = await scene.subscriber(*given)
    assert done.returncode == 0, done.stderr
    matches = dict(re.findall(r"^(SUBSCRIBER_\w+)='(.*)'$", done.stdout, re.MULTILINE))
    assert matches.keys() == {"SUBSCRIBER_TARGET_DSN", "SUBSCRIBER_APPLY_DSN"}
    status = await to_thread(scene.command, [str(scene.folder / "subscriber"), "status"], **matches)
    assert (status.returncode, status.stdout) == (0, "no subscriptions\n"), status.stderr
    assert secrets_of((await scene.subscriber(*given)).stdout) == []


@pytest.mark.parametrize("majors", CURRENT, indirect=True, ids=named)
async def test_nothing_is_changed_where_a_part_fails(scene: Scene) -> None:
    given = ("check", "--fix", "--execute", "--credentials", str(scene.folder / "credentials"))
    await scene.target.execute(f"CREATE ROLE {OWNER}_2 LOGIN")
    try:
        plain = scene.target.dsn(user=f"{OWNER}_2")
        done = await scene.subscriber(*given, "--target", plain)
        assert done.returncode == 3
        assert "Only superusers may do so." in done.stderr
        (scene.folder / "credentials" / "apply").write_text("mine")
        done = await scene.subscriber(*given, "--target", scene.target.dsn())
        assert "could not write connection strings to directory" in done.stderr
        assert [file.name for file in (scene.folder / "credentials").iterdir()] == ["apply"]
        roles = "SELECT count(*) FROM pg_roles WHERE rolname LIKE 'subscriber%'"
        assert await scene.target.value(roles) == 0
    finally:
        await scene.target.execute(f"DROP ROLE {OWNER}_2")


# --- rated by subscriber check ----------------------------------------------------------------------


@pytest.mark.parametrize("majors", CURRENT_AND_OLD_IN_SOAKS, indirect=True, ids=named)
async def test_check_names_the_code_that_a_session_must_not_run(scene: Scene) -> None:
    assert await scene.administrators(await of_new(scene))
    assert await scene.create(enabled="false"), scene.said

    async def check(*options: str) -> tuple[int, list[dict[str, Any]]]:
        done = await scene.subscriber("check", "s", "--json", "--target", scene.target.dsn(), *options)
        return done.returncode, json.loads(done.stdout)

    status, problems = await check()
    (wrong,) = [finding for finding in problems if finding["level"] != "ok"]
    assert (status, wrong["level"], wrong["subject"]) == (1, "error", "table app.orders")
    assert wrong["message"] == (
        f'role "postgres" must not apply its changes: they run code of role "{OWNER}", which could do there whatever'
        " the session's role may do: trigger note: function app.note()"
    )
    options = " WITH INHERIT FALSE, SET TRUE" if scene.majors[1] >= 16 else ""
    assert f'GRANT "{OWNER}" TO "{APPLY}"{options};' in wrong["fix"]
    assert f"SELECT subscriber.admit('{APPLY}', 'apply');" in wrong["fix"]
    status, problems = await check("--apply-target", scene.dsn_file(APPLY, scene.target))
    assert (status, {finding["level"] for finding in problems}) == (0, {"ok"})
    assert f'role "{APPLY}" applies changes' in {finding["message"] for finding in problems}
    await scene.target.execute("DROP TRIGGER note ON app.orders")
    status, problems = await check()
    assert (status, {finding["level"] for finding in problems}) == (0, {"ok"})
    note = 'role "postgres", a superuser, applies changes: no table runs code of another role'
    assert note in {finding["message"] for finding in problems}
    await scene.target.execute(f"SELECT subscriber.dismiss('{APPLY}', 'apply')")
    status, problems = await check("--apply-target", scene.dsn_file(APPLY, scene.target))
    assert f'role "{APPLY}" may not apply changes' in {finding["message"] for finding in problems if status == 1}
