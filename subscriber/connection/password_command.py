"""A command that prints the password of a connection: SUBSCRIBER_PASSWORD_COMMAND in the environment.

It is for passwords that expire, such as tokens of a cloud's IAM. It runs for each new connection, to the target and to
publishers, if neither the connection string nor the password file has a password. The server is in its environment:
PGHOST, PGPORT, PGUSER and PGDATABASE. Its first line is the password.

The connection string of a role that is not a superuser needs a password of its own. So such a role cannot send the
password of the command to a server of its choice.

Failure cases.

- The command fails, prints nothing or does not end: ConnectionLost, and a worker retries as for a server that cannot be
  reached. After TIMEOUT seconds the command's processes are killed.
- The connection attempt is canceled: the command's processes are killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from contextlib import suppress

from anyio import CancelScope

from subscriber.display import shell_word
from subscriber.errors import ConnectionLost
from subscriber.remedy import Remedy

VARIABLE = "SUBSCRIBER_PASSWORD_COMMAND"
TIMEOUT = 30.0  # seconds


async def password_from_command(
    parameters: Mapping[str, str], host: str, port: int, *, timeout: float = TIMEOUT
) -> str | None:
    """Run the command for one server, and return the password. None: there is no command.

    Args:
        parameters: complete parameters of the connection.
        host: the host's name, its address, or a socket directory.
        port: its port.
        timeout: seconds for the command.

    Raises:
        ConnectionLost: the command has failed.
    """
    command = os.environ.get(VARIABLE)
    if not command:
        return None
    server = {"PGHOST": host, "PGPORT": str(port), "PGUSER": parameters["user"], "PGDATABASE": parameters["dbname"]}
    process = await asyncio.create_subprocess_shell(
        command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **server},
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(timeout):
            output, errors = await process.communicate()
    except TimeoutError:
        raise _failure(f"did not end within {timeout:g} s", server) from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its children too
            with CancelScope(shield=True):
                await process.wait()
    if process.returncode != 0:
        reason = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise _failure(f"failed with exit status {process.returncode}: {reason}".removesuffix(": "), server)
    password = output.decode(errors="surrogateescape").partition("\n")[0].strip()
    if not password:
        raise _failure("printed nothing", server)
    return password


def _failure(what: str, server: Mapping[str, str]) -> ConnectionLost:
    words = " ".join(f"{name}={shell_word(value)}" for name, value in server.items())
    return ConnectionLost(
        f'password command for server "{server["PGHOST"]}", port {server["PGPORT"]} {what}',
        hint=Remedy("try it", f'{words} sh -c "${VARIABLE}"'),
    )
