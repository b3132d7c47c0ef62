"""Each privilege of the recipe is taken away while a subscription streams, and given back as the program says.

The next error has the command that gives it back, or names `subscriber check`, which has it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import anyio
import pytest

from subscriber.publisher.own_schema import OWN_SCHEMA
from tests.privileges.recipe.scene import APPLY, LAUNCHER, OWNER, PUBLISHER, Scene, named
from tests.privileges.recipe.test_check import PAIRS, problems

pytestmark = pytest.mark.xdist_group("recipe")

REFRESH = ("exec", "ALTER SUBSCRIPTION s REFRESH PUBLICATION")
SEQUENCES = ("exec", "ALTER SUBSCRIPTION s REFRESH SEQUENCES")
COPY = ("resync", "s", "app.orders", "--truncate")
WRITE = ("write",)  # a row on the publisher
OTHER = ("exec", "CREATE SUBSCRIPTION other CONNECTION '{publisher}' PUBLICATION p WITH (copy_data = false)")
ERROR = re.compile("ERROR:|permission denied")
STATEMENT = re.compile(r"HINT:  .*?(target|publisher|that server)[^:]*: ([A-Z]\w+ .*?;)(?= Or | Then |$)", re.MULTILINE)
NEW_SESSION = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{role}'"


@dataclass(frozen=True)
class Lost:
    """A privilege that a role loses.

    Attributes:
        side: publisher or target.
        taken: the statements that take it.
        needed_by: the arguments of a command that needs it, or WRITE.
        of: the role whose sessions end, so that new ones need the privilege.
        since: the first major version of the target with it.
        level: of the finding of `subscriber check`. None: `check` has none for a subscription that exists.
    """

    side: str
    taken: tuple[str, ...]
    needed_by: tuple[str, ...]
    of: str | None = None
    since: int = 0
    level: str | None = "error"


LOST = {
    "the apply role as the owner": Lost("target", (f"REVOKE {OWNER} FROM {APPLY}",), WRITE),
    "the launcher as the apply role": Lost("target", (f"REVOKE {APPLY} FROM {LAUNCHER}",), WRITE),
    "duty apply": Lost("target", (f"SELECT {OWN_SCHEMA}.dismiss('{APPLY}', 'apply')",), WRITE, of=APPLY),
    "duty launcher": Lost("target", (f"SELECT {OWN_SCHEMA}.dismiss('{LAUNCHER}', 'launcher')",), WRITE, of=LAUNCHER),
    "login of the apply role": Lost("target", (f"ALTER ROLE {APPLY} NOLOGIN",), WRITE, of=APPLY),
    "login of the launcher": Lost("target", (f"ALTER ROLE {LAUNCHER} NOLOGIN",), WRITE, of=LAUNCHER),
    "the target's database": Lost(
        "target",
        (
            "REVOKE CONNECT ON DATABASE {database} FROM PUBLIC",
            f"GRANT CONNECT ON DATABASE {{database}} TO {LAUNCHER}",
        ),
        WRITE,
        of=APPLY,
    ),
    "INSERT of the owner": Lost("target", (f"REVOKE INSERT ON app.orders FROM {OWNER}",), WRITE),
    "the owner's schema": Lost("target", (f"REVOKE USAGE ON SCHEMA app FROM {OWNER}",), WRITE, of=APPLY),
    "a table of a superuser": Lost("target", ("ALTER TABLE app.orders OWNER TO postgres",), WRITE),
    "a sequence of a superuser": Lost(
        "target",
        ("ALTER SEQUENCE app.orders_v_seq OWNED BY NONE", "ALTER SEQUENCE app.orders_v_seq OWNER TO postgres"),
        SEQUENCES,
    ),
    "the launcher's schema": Lost("target", (f"REVOKE USAGE ON SCHEMA app FROM {LAUNCHER}",), REFRESH, level="warning"),
    "creation": Lost("target", (f"REVOKE pg_create_subscription FROM {LAUNCHER}",), OTHER, since=16, level=None),
    "creation in the database": Lost(
        "target", (f"REVOKE CREATE ON DATABASE {{database}} FROM {LAUNCHER}",), OTHER, since=16, level=None
    ),
    "REPLICATION": Lost("publisher", (f"ALTER ROLE {PUBLISHER} NOREPLICATION",), WRITE, of=PUBLISHER),
    "login of the publisher's role": Lost("publisher", (f"ALTER ROLE {PUBLISHER} NOLOGIN",), WRITE, of=PUBLISHER),
    "the publisher's database": Lost(
        "publisher", ("REVOKE CONNECT ON DATABASE {database} FROM PUBLIC",), WRITE, of=PUBLISHER
    ),
    "the publisher's table": Lost("publisher", (f"REVOKE SELECT ON app.orders FROM {PUBLISHER}",), COPY),
    "the publisher's schema": Lost("publisher", (f"REVOKE USAGE ON SCHEMA app FROM {PUBLISHER}",), COPY),
    "the publisher's sequence": Lost("publisher", (f"REVOKE SELECT ON app.orders_v_seq FROM {PUBLISHER}",), SEQUENCES),
}


async def use(scene: Scene, lost: Lost) -> str:
    """Run the command that needs the privilege. Returns the output of the command, and what the launcher logs."""
    seen = len(scene.program.text)
    if lost.of:
        database = scene.source if lost.side == "publisher" else scene.target
        await database.execute(NEW_SESSION.format(role=lost.of))
    if lost.needed_by == WRITE:
        await scene.source.execute("UPDATE app.orders SET v = v + 1 WHERE id = 1")
        said = ""
    else:
        publisher = (scene.folder / PUBLISHER).read_text().replace("'", "''")
        done = await scene.as_recipe(*(word.format(publisher=publisher) for word in lost.needed_by))
        said = done.stdout + done.stderr
    with anyio.move_on_after(20):
        while not ERROR.search(said):
            await anyio.sleep(0.1)
            said = said + scene.program.text[seen:]
    return said


async def give_back(scene: Scene, lost: Lost, said: str) -> list[str]:
    """Run the statements that the program names, as an administrator of their server."""
    fixes = [
        (lost.side if side == "that server" else side, statement) for side, statement in {*STATEMENT.findall(said)}
    ]
    if not fixes:
        check = await problems(scene, "s")
        fixes = [(lost.side, finding["fix_command"]) for finding in check if finding["fix_command"]]
        assert all(f"n the {lost.side}: " in finding["fix"] or finding["subject"] == lost.side for finding in check), (
            check
        )
    for side, statement in fixes:
        await (scene.source if side == "publisher" else scene.target).execute(statement)
    return [statement for _, statement in fixes]


async def is_well(scene: Scene) -> bool:
    return (await scene.as_recipe("status", "s")).returncode == 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("majors", PAIRS, indirect=True, ids=named)
@pytest.mark.parametrize("side", ["publisher", "target"])
async def test_a_lost_privilege_is_named_and_given_back(
    scene: Scene, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUBSCRIBER_RETRY_INTERVAL", "0.5")
    await scene.streaming()
    for what, lost in LOST.items():
        if lost.side != side or scene.majors[1] < lost.since:
            continue
        database = scene.source if side == "publisher" else scene.target
        await database.execute(*(statement.format(database=database.name) for statement in lost.taken))
        said = await use(scene, lost)
        levels = {finding["level"] for finding in await problems(scene, "s")}
        assert levels == ({lost.level} if lost.level else set()), f"{what}: check finds {levels}\n{said}"
        assert await give_back(scene, lost, said), f"{what}: nothing gives it back\n{said}"
        if lost.needed_by != WRITE:
            await scene.as_recipe("exec", "DROP SUBSCRIPTION IF EXISTS other")
            again = await use(scene, lost)
            assert "denied" not in again, f"{what}\n{again}"
            await scene.as_recipe("exec", "DROP SUBSCRIPTION IF EXISTS other")
        with anyio.move_on_after(30):
            while not await is_well(scene):
                await anyio.sleep(0.2)
        status = await scene.as_recipe("status", "s")
        assert (status.returncode, await problems(scene, "s")) == (0, []), f"{what}\n{status.stdout}"
