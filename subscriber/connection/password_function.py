"""A function of the program that returns the password of a connection, for passwords that expire.

Connection strings of publishers are stored in the catalog, and a stored string cannot name code. The function is
therefore one for the process, as libpq's PQsetAuthDataHook() is: the launcher, statements, comparisons and checks all
connect here. It is called for each new connection, to the target and to publishers, if neither the connection string
nor the password file has a password. SUBSCRIBER_PASSWORD_COMMAND is used if it returns None.

The connection string of a role that is not a superuser needs a password of its own. So such a role cannot have the
function's password sent to a server of its choice.

Failure cases.

- The function raises an error or does not end: ConnectionLost, and a worker retries as for a server that cannot be
  reached. The text of its error is not shown, because it may contain a part of a token.
- The connection attempt is canceled: so is the function.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from inspect import isawaitable
from typing import TypeAlias

from subscriber.errors import ConnectionLost, SubscriberError

TIMEOUT = 30.0  # seconds, as for a command


@dataclass(frozen=True, slots=True)
class PasswordRequest:
    """The server and role for which a password is needed.

    Attributes:
        host: the host's name, its address, or a socket directory.
        port: its port.
        user: the role.
        dbname: the database.
    """

    host: str
    port: int
    user: str
    dbname: str


PasswordFunction: TypeAlias = Callable[[PasswordRequest], str | Awaitable[str | None] | None]

_function: PasswordFunction | None = None


def set_password_function(function: PasswordFunction | None) -> PasswordFunction | None:
    """Set the function that returns the password of each new connection without one. Returns the function before.

    It applies to the whole process: to targets and to the publishers of subscriptions. An application of `subscriber
    run --app` calls this when its module is imported. Processes of their own, such as Spark's executors, do not have
    the function.

    Args:
        function: a function, or an async one, that returns the password; None if it has none for that server. A
            connection waits for it for 30 s at most. None: passwords come from connection strings, files and
            SUBSCRIBER_PASSWORD_COMMAND.
    """
    global _function
    before, _function = _function, function
    return before


async def password_from_function(
    parameters: Mapping[str, str], host: str, port: int, *, timeout: float = TIMEOUT
) -> str | None:
    """Call the function for one server, and return the password. None: there is no function, or it has none.

    Args:
        parameters: complete parameters of the connection.
        host: the host's name, its address, or a socket directory.
        port: its port.
        timeout: seconds for the function.

    Raises:
        ConnectionLost: the function has failed.
    """
    if _function is None:
        return None
    try:
        async with asyncio.timeout(timeout):
            answer = _function(PasswordRequest(host, port, parameters["user"], parameters["dbname"]))
            return await answer if isawaitable(answer) else answer
    except TimeoutError:
        reason = f"did not end within {timeout:g} s"
    except SubscriberError:
        raise
    except Exception as error:
        reason = f"has raised {type(error).__name__}"
    raise ConnectionLost(f'password function for server "{host}", port {port} {reason}')
