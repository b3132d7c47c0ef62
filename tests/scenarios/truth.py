"""What an operator reads about one situation in five places, and the commands that they name, executed."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio

from subscriber.settings import Settings
from tests.cli.test_http import FRESH, Client, served
from tests.plugins.fix_cluster import Database
from tests.scenarios.conftest import Pair
from tests.scenarios.test_health import ALARM, LOOK, Monitor

PROGRAM = [sys.executable, "-m", "subscriber"]
# Statements for the publisher. All others are SUBSCRIPTION statements for the target.
_OF_PUBLISHER = re.compile(r"(CREATE|ALTER) PUBLICATION|(ROLLBACK|COMMIT) PREPARED|ALTER ROLE|GRANT|SELECT pg_")


@dataclass
class Truth(Monitor):
    """The places where an operator sees the state of subscription s, and a terminal."""

    client: Client
    target: Database
    source: Database

    async def problems(self, kind: str) -> list[dict[str, Any]]:
        """Return the problems of a kind in the document of the console."""
        _, document = await self.client.json("/console.json?subscription=s")
        return [problem for problem in document["summary"]["problems"] if problem["kind"] == kind]

    async def says(self, kind: str, message: str, printed: str = "") -> list[str]:
        """Wait until the console has a problem that matches. All other places must agree.

        Args:
            kind: the kind of the problem.
            message: the message of the problem.
            printed: its line in `subscriber status`, if it is not the message.

        Returns:
            The commands of the problem's remedy.
        """
        problems: list[dict[str, Any]] = []
        matching: list[dict[str, Any]] = []
        with anyio.move_on_after(ALARM):
            while not matching:
                problems = await self.problems(kind)
                matching = [problem for problem in problems if re.search(message, problem["message"])]
                await anyio.sleep(LOOK)
        assert matching, problems
        problem = matching[0]
        code, health = await self.health()
        assert code == 503
        assert any(re.search(message, text) for text in health["problems"]), health
        exit_status, document = await self.command()
        assert (exit_status, document["ok"]) == (1, False)
        assert any(re.search(message, text) for text in document["problems"]), document
        figures = await self.client.figures()
        assert figures["subscriber_subscription_ok", "s"] == 0
        assert figures["subscriber_subscription_problem", "s", kind] >= 1
        exit_status, text = await self.run("status")
        assert exit_status == 1
        assert re.search(printed or message, text), text
        hint = "".join(part for part, _ in problem["hint"])
        assert hint, "there is no next step"
        assert " ".join(hint.split()) in " ".join(text.split()), (hint, text)
        assert "\\n" not in text
        return [part for part, is_command in problem["hint"] if is_command]

    async def run(self, *arguments: str) -> tuple[int, str]:
        """Run a command of `subscriber` on the target. Returns its exit status and its output."""
        environment = {**os.environ, "SUBSCRIBER_TARGET_DSN": self.target.dsn()}
        done = await anyio.run_process([*PROGRAM, *arguments], check=False, env=environment)
        return done.returncode, (done.stdout + done.stderr).decode()

    async def paste(self, command: str, exit_status: int = 0) -> str:
        """Run a command of a remedy where it belongs. Returns the output of a shell's command."""
        if command.startswith("subscriber "):
            words = command.removeprefix("subscriber")
            shell = f"{' '.join(PROGRAM)}{words}"
            environment = {**os.environ, "SUBSCRIBER_TARGET_DSN": self.target.dsn()}
            process = await asyncio.create_subprocess_shell(
                shell, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )
            output = (await process.communicate())[0].decode()
            assert process.returncode == exit_status, output
            return output
        if _OF_PUBLISHER.match(command):
            await self.source.execute(command.removesuffix(";"))
            return ""
        status, output = await self.run("exec", command)
        assert status == exit_status, output
        return output


@asynccontextmanager
async def truth(pair: Pair, settings: Settings = FRESH) -> AsyncIterator[Truth]:
    """Serve the console for subscription s."""
    async with served(pair.subscriber, pair.target.dsn(), settings=settings) as client:
        yield Truth(client, pair.target, pair.source)
