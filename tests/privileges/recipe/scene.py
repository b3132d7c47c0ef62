"""Two databases, and the commands of an administrator who follows the recipe of least privilege."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from asyncio import to_thread
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import pytest

from subscriber.demo.servers import embedded_bin
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Program

OWNER, LAUNCHER, APPLY, PUBLISHER = "app_owner", "subscriber_launcher", "subscriber_apply", "subscriber_publisher"
ADMIN = "app_admin"
PASSWORDS = {ADMIN: "secret", LAUNCHER: "launcher's own", APPLY: "apply's own", PUBLISHER: "publisher's own"}
# Publisher and target.
PAIRS = [(13, 18), (14, 14), (15, 15), (16, 16), (17, 17), (18, 18)]
CURRENT = [(18, 18)]
OLD = [(15, 15)]
CURRENT_AND_OLD_IN_SOAKS = [*CURRENT, *(pytest.param(pair, marks=pytest.mark.soak) for pair in OLD)]


def named(majors: tuple[int, int]) -> str:
    return f"{majors[0]}-to-{majors[1]}"


ON_PUBLISHER = (
    "CREATE SCHEMA app",
    "CREATE TABLE app.orders (id int PRIMARY KEY, v serial)",
    "INSERT INTO app.orders SELECT g, g FROM generate_series(1, 100) g",
    "CREATE PUBLICATION p FOR TABLE app.orders",
)
ON_TARGET = (
    f"CREATE ROLE {OWNER}",
    f"CREATE SCHEMA app AUTHORIZATION {OWNER}",
    f"""
    SET ROLE {OWNER};
    CREATE TABLE app.orders (id int PRIMARY KEY, v serial);
    CREATE TABLE app.seen (id int, who name);
    CREATE FUNCTION app.note() RETURNS trigger LANGUAGE plpgsql
        AS $$ BEGIN INSERT INTO app.seen VALUES (NEW.id, current_user); RETURN NULL; END $$;
    CREATE TRIGGER note AFTER INSERT ON app.orders FOR EACH ROW EXECUTE FUNCTION app.note();
    ALTER TABLE app.orders ENABLE ALWAYS TRIGGER note
    """,
)


@dataclass
class Scene:
    """Two databases, each of its own superuser, and the commands that an administrator runs for them."""

    source: Database
    target: Database
    majors: tuple[int, int]
    folder: Path
    program: Program
    said: str = ""  # by all commands so far

    def command(self, program: list[str], *, given: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a program without a terminal, and record its output."""
        done = subprocess.run(
            program,
            input=given,
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,
            env={**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}", **environment},
        )
        self.said += done.stdout + done.stderr
        return done

    async def subscriber(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return await to_thread(self.command, [sys.executable, "-m", "subscriber", *arguments])

    async def as_recipe(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command with the target's roles of the recipe, as the environment of its last step names them."""
        dsns = {
            "SUBSCRIBER_TARGET_DSN": self.dsn_file(LAUNCHER, self.target),
            "SUBSCRIBER_APPLY_DSN": self.dsn_file(APPLY, self.target),
        }
        return await to_thread(partial(self.command, [sys.executable, "-m", "subscriber", *arguments], **dsns))

    async def paste(self, output: str) -> None:
        """Run the statements of the hints of an output, as the administrators of both servers."""
        matches = re.findall(r"HINT:  On the (publisher|target): (.*;)$", output, re.MULTILINE)
        assert matches, output
        for side, statements in matches:
            await (self.source if side == "publisher" else self.target).execute(statements)

    async def streaming(self, **options: str) -> None:
        """Set up the roles and the subscription, run the launcher, and wait until the tables are copied."""
        assert await self.administrators(await of_new(self)), self.said
        assert await self.create(**{"two_phase": "false", **options}), self.said
        await self.run()
        await self.target.wait_for("SELECT bool_and(srsubstate IN ('s', 'r')) FROM subscriber.subscription_rel")
        self.said = ""

    async def recipe(self, *options: str) -> str:
        done = await self.subscriber("check", "--fix", "--target", self.target.dsn(), *options)
        assert done.returncode == 0, done.stderr
        self.said = ""  # else the recipe's own words would count
        return done.stdout

    def psql(self, database: Database, script: str, user: str = "postgres") -> bool:
        """Run a script as that role; whether it has worked. It asks for passwords."""
        file = self.folder / "script.sql"
        file.write_text(script)
        asked = re.findall(r'^\\password "(\w+)"$', script, re.MULTILINE)
        psql = [str(embedded_bin() / "psql"), "-X", "-v", "ON_ERROR_STOP=1", "-f", str(file), database.dsn(user=user)]
        given = "".join(f"{PASSWORDS[role]}\n" * 2 for role in asked)
        return self.command(psql, given=given, SUBSCRIBER_TARGET_DSN=self.target.dsn(user=user)).returncode == 0

    async def administrators(self, recipe: str) -> bool:
        """Run the printed recipe as the administrators of both servers. Returns True if it has worked."""
        _, of_target, of_publisher = recipe.split("-- Least privilege for subscriber: ")
        scripts = [(self.source, f"-- {of_publisher}"), (self.target, f"-- {of_target}")]
        return all([await to_thread(self.psql, database, script) for database, script in scripts])

    def dsn_file(self, role: str, database: Database) -> str:
        """@FILE with a connection string."""
        file = self.folder / role
        where = f"host=127.0.0.1 port={database.server.port} dbname={database.name}"
        secret = PASSWORDS[role].replace("'", "\\'")
        file.write_text(f"{where} user={role} password='{secret}'")
        file.chmod(0o600)
        return f"@{file}"

    async def create(self, **options: str) -> bool:
        """Create subscription s, before 16 as in a note of the recipe. Returns True if it has worked."""
        dsn_file = self.dsn_file(PUBLISHER, self.source)
        conninfo = Path(dsn_file[1:]).read_text().replace("'", "''")
        given = {"two_phase": str(self.majors[0] >= 15).lower(), **options}
        statement = f"CREATE SUBSCRIPTION s CONNECTION '{conninfo}' PUBLICATION p WITH ("
        if self.majors[1] >= 16:
            who = self.dsn_file(LAUNCHER, self.target)
        else:
            who = self.target.dsn()
            given["enabled"] = "false"
        statement += ", ".join(f"{name} = {value}" for name, value in given.items()) + ")"
        if self.majors[1] < 16:
            statement += f"; ALTER SUBSCRIPTION s OWNER TO {LAUNCHER}; ALTER SUBSCRIPTION s ENABLE"
        return (await self.subscriber("exec", "--target", who, statement)).returncode == 0

    async def streams(self) -> None:
        """Copy, changes, a trigger of the owner, and a prepared transaction."""
        states = "SELECT string_agg(srsubstate::text, '') FROM subscriber.subscription_rel"
        await self.target.wait_for(states, "r")
        await self.source.execute(
            "INSERT INTO app.orders VALUES (200, 200)",
            "UPDATE app.orders SET v = 7 WHERE id <= 10",
            "DELETE FROM app.orders WHERE id = 50",
        )
        if self.majors[0] >= 15:
            await self.source.execute("BEGIN; INSERT INTO app.orders VALUES (300, 300); PREPARE TRANSACTION 'mine'")
            await self.target.wait_for("SELECT count(*) FROM pg_prepared_xacts", 1)
            await self.source.execute("COMMIT PREPARED 'mine'")
        await self.source.wait_for_catchup("s")
        rows = "SELECT * FROM app.orders ORDER BY id"
        assert await self.target.rows(rows) == await self.source.rows(rows)
        assert {who for (who,) in await self.target.rows("SELECT DISTINCT who FROM app.seen")} == {OWNER}

    async def run(self) -> None:
        await self.program.start("")

    async def says(self, text: str) -> None:
        """Wait until one of the commands has printed the text."""
        with anyio.move_on_after(20):
            while text not in self.said + self.program.text:
                await anyio.sleep(0.05)
            return
        pytest.fail(f"nobody says {text!r}:\n{self.said}\n{self.program.text}")


async def of_new(scene: Scene) -> str:
    return await scene.recipe("--source", scene.source.dsn(), "--publication", "p")
