"""Hooks of a move: programs that stop applications, lead them to the other server, and let them continue.

    pause     before the fence closes; the pause of applications begins
    switch    the other server is open: lead applications there
    resume    after `switch`, or after the serving server was opened again: let applications continue

A hook is a shell command, the address of an HTTP service, or an async function. It receives a HookCall: a command as
JSON on its standard input and as variables of its environment, a service as JSON in the body of a POST.

Failure cases:

- `pause` fails, or does not end within the limit of the pause: the move is undone, and `resume` runs.
- `switch` or `resume` fails: the move has happened, and the result has a warning. The same command repeats the hooks.
- The command is killed: `cutover`, `back` or `abort` runs the hooks that are due. They are stored with the phase.
- A hook is repeated after a kill. It must not fail if its effect is there.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from tempfile import TemporaryFile
from typing import TypeAlias

import anyio
import anyio.to_thread

from subscriber.connection import defaults
from subscriber.connection.conninfo import Conninfo
from subscriber.connection.hosts import targets
from subscriber.display import shell_word
from subscriber.errors import SubscriberError
from subscriber.sqlstate import EXTERNAL_ROUTINE_EXCEPTION

HTTP_TIMEOUT = 30.0  # seconds for an answer
OUTPUT_SHOWN = 500  # characters of a failed command's output


class HookEvent(StrEnum):
    """An event that hooks are called for."""

    PAUSE = "pause"
    SWITCH = "switch"
    RESUME = "resume"


@dataclass(frozen=True, slots=True)
class HookCall:
    """The arguments of a hook.

    Attributes:
        event: pause, switch or resume.
        migration: the name of the move.
        command: cutover, back or abort.
        serving: the server that applications are to use after this hook: source or target.
        host: of that server, as in the connection string of the command.
        port: of that server.
        database: of that server.
    """

    event: HookEvent
    migration: str
    command: str
    serving: str
    host: str
    port: int
    database: str

    def environment(self) -> dict[str, str]:
        """Return the call as variables of an environment."""
        return {f"SUBSCRIBER_MIGRATE_{name.upper()}": str(value) for name, value in asdict(self).items()}


HookFunction: TypeAlias = Callable[[HookCall], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class MoveHook:
    """A function, and the event that it is called for. None: for each event."""

    function: HookFunction
    event: HookEvent | None = None


def address(dsn: str) -> tuple[str, int, str]:
    """Return host, port and database of a connection string: of the first host, if it has several."""
    parameters = defaults.complete(Conninfo.parse(dsn))
    first = targets(parameters)[0]
    return first.host or first.address, first.port, parameters["dbname"]


async def run_hooks(hooks: Sequence[MoveHook], call: HookCall) -> int:
    """Call the hooks of an event, in their order. Returns their number.

    Raises:
        SubscriberError: a hook has failed. The following ones are not called.
    """
    due = [hook for hook in hooks if hook.event in (None, call.event)]
    for hook in due:
        try:
            await hook.function(call)
        except SubscriberError:
            raise
        except Exception as error:
            raise SubscriberError(
                f"the hook for {call.event} has failed: {error}", sqlstate=EXTERNAL_ROUTINE_EXCEPTION
            ) from error
    return len(due)


def shell_hook(command: str) -> HookFunction:
    """Return a hook that runs a shell command. Another exit status than 0 is an error."""

    async def run(call: HookCall) -> None:
        # A file and not a pipe, which a command that does not read it would break.
        with TemporaryFile() as content:
            content.write(json.dumps(asdict(call)).encode())
            content.seek(0)
            environment = {**os.environ, **call.environment()}
            done = await anyio.run_process(command, stdin=content, env=environment, check=False)
        if done.returncode != 0:
            output = (done.stderr or done.stdout).decode(errors="replace").strip()
            raise SubscriberError(
                f"the hook for {call.event} has failed: {shell_word(command)}",
                detail=f"Exit status {done.returncode}. {output[-OUTPUT_SHOWN:]}".strip(),
                sqlstate=EXTERNAL_ROUTINE_EXCEPTION,
            )

    return run


def http_hook(url: str) -> HookFunction:
    """Return a hook that sends a POST. Another status than 2xx is an error."""

    async def run(call: HookCall) -> None:
        request = urllib.request.Request(
            url, data=json.dumps(asdict(call)).encode(), headers={"Content-Type": "application/json"}, method="POST"
        )

        def send() -> None:
            try:
                urllib.request.urlopen(request, timeout=HTTP_TIMEOUT).close()
            except urllib.error.HTTPError as error:
                error.close()
                raise

        try:
            await anyio.to_thread.run_sync(send, abandon_on_cancel=True)
        except (urllib.error.URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise SubscriberError(
                f"the hook for {call.event} has failed: {reason}", sqlstate=EXTERNAL_ROUTINE_EXCEPTION
            ) from error

    return run


def parse_hook(text: str) -> MoveHook:
    """Return the hook of option --hook: [EVENT=]COMMAND or [EVENT=]URL."""
    event, separator, rest = text.partition("=")
    hook_event = HookEvent(event) if separator and event in set(HookEvent) else None
    action = rest if hook_event is not None else text
    if action.startswith(("http://", "https://")):
        return MoveHook(http_hook(action), hook_event)
    return MoveHook(shell_hook(action), hook_event)
