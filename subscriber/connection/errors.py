"""asyncpg's and the operating system's errors of connecting, turned into ours with libpq's words."""

from __future__ import annotations

import os
import re
import socket
import ssl

import asyncpg

from subscriber.connection.hosts import HostSpec
from subscriber.display import shell_word, shortened
from subscriber.errors import ConnectionLost, ConninfoError, ServerError, SubscriberError
from subscriber.redaction import redact
from subscriber.remedy import Remedy
from subscriber.sqlstate import (
    INVALID_AUTHORIZATION_SPECIFICATION,
    PROTOCOL_VIOLATION,
    SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION,
)

# What asyncpg's methods raise: errors of the session, and those of the server as well. A server that is not PostgreSQL,
# or hostile, sends texts that are not in the encoding of the session.
CLIENT_ERRORS = (asyncpg.InterfaceError, asyncpg.InternalClientError, UnicodeError, OSError)
ASYNCPG_ERRORS = (asyncpg.PostgresError, *CLIENT_ERRORS)

_ATTEMPT = re.compile(r"\[Errno (\d+)\] Connect call failed \('([^']*)'")

_UNSUPPORTED_PARAMETER = "unsupported startup parameter: "  # PgBouncer's words, which it does not translate


class ConnectError(ServerError):
    """The server refused a connection attempt with an error. `libpq_message` is the message that libpq shows for it."""

    def __init__(self, fields: dict[str, str], where: str) -> None:
        super().__init__(fields)
        self.libpq_message = f"{where}{fields.get('S', 'FATAL')}:  {self.message}"


def libpq_message(error: SubscriberError) -> str:
    """Return libpq's message for an error of connect(): the part after "could not connect to the publisher: "."""
    return error.libpq_message if isinstance(error, ConnectError) else error.message


def translate(error: Exception, target: HostSpec, *, replication: bool = False) -> SubscriberError:
    """Convert an error of asyncpg.connect(). `replication`: the connection was to be a walsender."""
    where = target.failed()
    match error:
        case asyncpg.PostgresConnectionError() if not _is_answer(error):  # asyncpg's own word for a closed socket
            return ConnectionLost(where + "server closed the connection unexpectedly")
        case asyncpg.PostgresError():
            return _refused(ConnectError(server_fields(error), where), replication=replication)
        case TimeoutError():
            return ConnectionLost(where + "timeout expired")
        case ssl.SSLCertVerificationError():
            return ConnectionLost(where + f"SSL error: certificate verify failed: {error.verify_message}")
        case ssl.SSLError():
            return ConnectionLost(where + f"SSL error: {error.reason or error}")
        case socket.gaierror():
            return ConnectionLost(
                f'could not translate host name "{target.host}" to address: {error.strerror}',
                hint=Remedy("correct host in the connection string. Try it", f"getent hosts {shell_word(target.host)}"),
            )
        case ConnectionError() if "rejected SSL upgrade" in str(error):
            return ConnectionLost(where + "server does not support SSL, but SSL was required")
        case OSError():
            return _network_failure(error, target)
        case asyncpg.ClientConfigurationError():
            return ConninfoError(str(error), sqlstate=SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION)
        case asyncpg.InterfaceError() | asyncpg.InternalClientError() | ValueError():
            return ConnectionLost(where + str(error))
    return ConnectionLost(f"{where}the server's answer could not be read: {type(error).__name__}: {error}")


def _is_answer(error: asyncpg.PostgresError) -> bool:
    """Return True if the server has sent the error, which then has a severity."""
    return getattr(error, "severity", None) is not None


def is_unsupported_parameter(error: ConnectError) -> bool:
    """Return True if a connection pooler refuses a parameter at the start of a session."""
    return error.sqlstate == PROTOCOL_VIOLATION and error.message.startswith(_UNSUPPORTED_PARAMETER)


def is_not_admitted(error: SubscriberError) -> bool:
    """Return True if the server refuses the role, perhaps because of pg_hba.conf."""
    return isinstance(error, ConnectError) and error.sqlstate == INVALID_AUTHORIZATION_SPECIFICATION


def is_tls_failure(error: SubscriberError) -> bool:
    """Return True if an attempt with TLS has failed for a reason that plain text does not have."""
    cause = error.__cause__
    return isinstance(cause, ssl.SSLError | ConnectionResetError) or "rejected SSL upgrade" in str(cause)


def _refused(error: ConnectError, *, replication: bool) -> ConnectError:
    """Add a hint to what PgBouncer says, which speaks English only."""
    if not is_unsupported_parameter(error) or error.hint is not None:
        return error
    name = error.message.removeprefix(_UNSUPPORTED_PARAMETER)
    if replication:
        hint = (
            "A connection pooler answers, and PgBouncer passes no replication connection on before 1.23. Connect to the"
            " publisher itself."
        )
    else:
        hint = (
            f'A connection pooler answers. Connect to the server itself, leave "{name}" out of the connection string,'
            f" or add it to ignore_startup_parameters of PgBouncer, which then ignores it."
        )
    return error.amend(hint=hint)


def _network_failure(error: OSError, target: HostSpec) -> ConnectionLost:
    """Return one message for all addresses of a name. asyncio puts them into one text."""
    if target.is_socket:
        hint = "Is the server running locally and accepting connections on that socket?"
    else:
        hint = "Is the server running on that host and accepting TCP/IP connections?"
    attempts = [(int(number), address) for number, address in _ATTEMPT.findall(str(error))]
    if target.is_socket or not attempts:
        reason = os.strerror(error.errno) if error.errno else str(error)
        return ConnectionLost(target.failed() + reason, hint=hint)
    return ConnectionLost(
        "; ".join(target.failed(address) + os.strerror(number) for number, address in attempts), hint=hint
    )


def server_fields(error: asyncpg.PostgresError) -> dict[str, str]:
    """Return the fields of an ErrorResponse, by the protocol's letters, out of asyncpg's exception.

    Long texts are shortened. The exception loses them and the passwords of connection strings too, because a traceback
    shows it as a cause.
    """
    texts = {name: redact(shortened(text)) for name, text in vars(error).items() if isinstance(text, str)}
    vars(error).update(texts)
    error.args = tuple(redact(shortened(str(argument))) for argument in error.args)
    letters = {
        "S": "severity",
        "V": "severity_en",
        "C": "sqlstate",
        "M": "message",
        "D": "detail",
        "H": "hint",
        "W": "context",
        "s": "schema_name",
        "t": "table_name",
        "c": "column_name",
        "d": "data_type_name",
        "n": "constraint_name",
    }
    fields = {letter: getattr(error, name, None) for letter, name in letters.items()}
    fields["M"] = fields["M"] or str(error)
    return {letter: str(value) for letter, value in fields.items() if value}
