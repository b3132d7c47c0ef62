"""Connect to a server with libpq's rules. asyncpg opens the socket and authenticates.

Hosts are tried in order, one attempt each with its own timeout and its own password from the password
file. The first host that accepts the session and has the requested `target_session_attrs` is used. A host that cannot
be reached, or is starting up, is skipped. Any other error of a host (wrong password, no such database) ends the
search, as in libpq.

This module converts every error of connecting, asyncpg's and the operating system's, into one of these:

    ConninfoError    a parameter has an impossible value, or requests an unsupported feature
    ConnectionLost   no host could be reached; the message is libpq's
    ConnectError     a server refused the session; its SQLSTATE decides whether a retry makes sense
    PublisherError   a password was required and the server did not request one

Source: src/interfaces/libpq/fe-connect.c, pqConnectOptions2() and PQconnectPoll().
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from urllib.parse import urlencode

import asyncpg

from subscriber.connection import authentication, defaults, tls
from subscriber.connection.array_types import ARRAY_TYPES
from subscriber.connection.conninfo import Conninfo
from subscriber.connection.errors import (
    ConnectError,
    is_not_admitted,
    is_tls_failure,
    is_unsupported_parameter,
    libpq_message,
    translate,
)
from subscriber.connection.hosts import HostSpec, integer, targets
from subscriber.connection.password_command import password_from_command
from subscriber.connection.password_function import password_from_function
from subscriber.connection.refusals import refusal_remedy
from subscriber.connection.session import Session
from subscriber.connection.settings import ALWAYS, LATER, known
from subscriber.display import near_word
from subscriber.errors import ConnectionLost, ConninfoError, ServerError, SubscriberError
from subscriber.quoting import literal
from subscriber.sqlstate import CANNOT_CONNECT_NOW, FEATURE_NOT_SUPPORTED, SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION

TIMEOUT = 60.0  # seconds for one host when neither `timeout` nor connect_timeout says otherwise

SSL_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
SESSION_ATTRIBUTES = ("any", "read-write", "read-only", "primary", "standby", "prefer-standby")

# Unsupported features: keyword -> the values that do not need the feature. Other values are refused, not ignored.
_UNSUPPORTED: Mapping[str, tuple[str, ...]] = {
    "channel_binding": ("disable", "prefer"),
    "require_auth": (),
    "requirepeer": (),
    "gssencmode": ("disable", "prefer"),
    "gssdelegation": ("0",),
    "sslcertmode": ("allow", "disable"),
    "sslsni": ("1",),
    "sslkeylogfile": (),
    "scram_client_key": (),
    "scram_server_key": (),
    "min_protocol_version": ("3.0",),
}


def check(parameters: Mapping[str, str]) -> None:
    """Check the values that libpq checks, and refuse unsupported features. Raises ConninfoError."""
    mode = parameters["sslmode"]
    for keyword, value, values in (
        ("sslmode", mode, SSL_MODES),
        ("target_session_attrs", parameters["target_session_attrs"], SESSION_ATTRIBUTES),
        ("load_balance_hosts", parameters["load_balance_hosts"], ("disable", "random")),
        ("sslnegotiation", parameters.get("sslnegotiation", "postgres"), ("postgres", "direct")),
    ):
        if value not in values:
            raise ConninfoError(
                f'invalid {keyword} value: "{value}"',
                hint=near_word(value, values) or f"Valid are: {', '.join(values)}.",
                sqlstate=SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION,
            )
    if parameters.get("sslrootcert") == tls.SYSTEM and mode not in ("verify-full", "disable"):
        raise ConninfoError(
            f'weak sslmode "{mode}" may not be used with sslrootcert=system (use "verify-full")',
            sqlstate=SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION,
        )
    if parameters.get("sslnegotiation") == "direct" and SSL_MODES.index(mode) < SSL_MODES.index("require"):
        raise ConninfoError(
            f'weak sslmode "{mode}" may not be used with sslnegotiation=direct '
            '(use "require", "verify-ca", or "verify-full")',
            sqlstate=SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION,
        )
    for keyword, harmless in _UNSUPPORTED.items():
        if parameters.get(keyword, "") not in ("", *harmless):
            raise ConninfoError(
                f'connection option "{keyword}" cannot be honoured by this client',
                detail=f"Values that need nothing of it are: {', '.join(harmless) or 'none'}.",
                hint="Leave the option out.",
                sqlstate=FEATURE_NOT_SUPPORTED,
            )


def asyncpg_arguments(
    parameters: Mapping[str, str], target: HostSpec, server_settings: Mapping[str, str]
) -> dict[str, object]:
    """The keyword arguments of asyncpg.connect() for one host, without `timeout` and those of encryption()."""
    arguments: dict[str, object] = {
        "host": target.address or target.host,
        "port": target.port,
        "user": parameters["user"],
        "database": parameters["dbname"],
        "password": defaults.password(parameters, target.host or target.address, target.port),
        "server_settings": dict(server_settings),
        # Never asyncpg's own choice among hosts: the checks it makes do not work on a walsender.
        "target_session_attrs": "any",
    }
    for keyword in ("passfile", "krbsrvname", "gsslib"):
        if keyword in parameters:
            arguments[keyword] = parameters[keyword]
    return arguments


def encryption(parameters: Mapping[str, str], target: HostSpec) -> list[Callable[[], dict[str, object]]]:
    """Return functions that make the arguments of asyncpg.connect() for TLS, one for each attempt.

    asyncpg verifies nothing with allow and prefer. So these modes take two attempts if there are files for TLS. The
    functions raise ConninfoError if a file cannot be used.
    """

    def secure() -> dict[str, object]:
        context = tls.context(parameters, target.host, target.address)
        return {"ssl": context, "direct_tls": parameters.get("sslnegotiation") == "direct"}

    def plain() -> dict[str, object]:
        return {"ssl": "disable"}

    mode = parameters["sslmode"]
    if target.is_socket or mode == "disable":
        return [plain]
    if mode not in ("allow", "prefer"):
        return [secure]
    if tls.uses_files(parameters):
        return [secure, plain] if mode == "prefer" else [plain, secure]
    versions = ("ssl_min_protocol_version", "ssl_max_protocol_version")  # asyncpg takes these by URI only
    given = {keyword: parameters[keyword] for keyword in versions if keyword in parameters}
    return [lambda: {"dsn": "postgresql:///?" + urlencode({"sslmode": mode, **given})}]


def _server_settings(
    parameters: Mapping[str, str], application_name: str | None, settings: Mapping[str, str], replication: bool
) -> dict[str, str]:
    """The startup packet's parameters. They override what `options` says of the same setting."""
    startup = dict(settings)
    if name := parameters.get("application_name") or application_name or parameters.get("fallback_application_name"):
        startup["application_name"] = name
    if "options" in parameters:
        startup["options"] = parameters["options"]
    if replication:
        startup["replication"] = "database"
    return startup


_POOLERS: set[HostSpec] = set()  # which refuse settings at the start of a session; each refusal is a line in their log


async def connect(
    conninfo: Conninfo | str,
    *,
    application_name: str | None = None,
    settings: Mapping[str, str] = MappingProxyType({}),
    replication: bool = False,
    plain: bool = False,
    must_use_password: bool = False,
    timeout: float | None = None,
) -> asyncpg.Connection:
    """Open a connection.

    The client_encoding and replication of the connection string are ignored: this function sets both.

    Args:
        conninfo: connection string, or its parsed form.
        application_name: a fallback; the connection string and the environment take precedence.
        settings: server settings of the session. They take precedence over `options` of the connection string.
            settings.ALWAYS is added to them, without the settings that the server does not have.
        replication: open a walsender of the named database. It has only `settings`, and supports only simple queries:
            execute() without arguments.
        plain: request no settings but `settings`, for the console of a connection pooler.
        must_use_password: set for the connection string of a role that is not a superuser. The string must have a
            password, and the server must request it (authentication.py); no statement is sent to other servers.
        timeout: limit of each attempt, in seconds. None: connect_timeout of the connection string, then TIMEOUT.

    Raises:
        ConninfoError: a parameter is invalid or unsupported.
        ConnectionLost: no host could be reached.
        ConnectError: a server refused the session.
        PublisherError: a password was required and was not used (SQLSTATE 2F003).
        RuntimeError: no asyncio event loop is running.

    Cancellation: closes the connection.
    """
    if isinstance(conninfo, str):
        conninfo = Conninfo.parse(conninfo)
    _refuse_trio()
    conninfo = await conninfo.renewed()
    if must_use_password:
        authentication.check_conninfo(conninfo)
    parameters = defaults.complete(conninfo)
    check(parameters)
    candidates = targets(parameters)
    if parameters["load_balance_hosts"] == "random":
        random.shuffle(candidates)
    limit = _time_limit(parameters, timeout)
    if not replication and not plain:
        settings = {**ALWAYS, **settings}
    later = {name: value for name, value in settings.items() if name in LATER}
    given = {name: value for name, value in settings.items() if name not in LATER}
    fewer = _server_settings(parameters, application_name, {}, replication)
    startup = {**given, **fewer}
    wanted = parameters["target_session_attrs"]
    failures: list[SubscriberError] = []
    for attribute in ("standby", "any") if wanted == "prefer-standby" else (wanted,):
        failures.clear()
        for target in candidates:
            try:
                arguments = asyncpg_arguments(parameters, target, startup)
                if arguments["password"] is None:
                    server = (parameters, target.host or target.address, target.port)
                    password = await password_from_function(*server)
                    arguments["password"] = await password_from_command(*server) if password is None else password
                connection, is_pooler = await _open_in_turn(
                    encryption(parameters, target),
                    target,
                    arguments,
                    fewer,
                    limit,
                    must_use_password=must_use_password,
                )
                await _prepare(connection, attribute, parameters, {**given, **later} if is_pooler else later, target)
            except ConnectionLost as error:
                failures.append(error)
            except ConnectError as error:
                if error.sqlstate != CANNOT_CONNECT_NOW:
                    error.amend(
                        hint=error.remedy
                        or refusal_remedy(
                            error.sqlstate,
                            error.message,
                            parameters,
                            replication=replication,
                            has_password=arguments["password"] is not None,
                        )
                    )
                    error.amend(detail=error.detail or f"The server is {target.place}.")
                    raise
                failures.append(error)
            else:
                return connection
    if len(failures) == 1:
        raise failures[0]
    raise ConnectionLost("; ".join(libpq_message(failure) for failure in failures), hint=failures[-1].hint)


def _refuse_trio() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        message = "subscriber needs asyncio: trio is not supported. Use anyio.run(main, backend='asyncio')"
        raise RuntimeError(message) from None


async def open_session(
    conninfo: Conninfo | str,
    *,
    application_name: str | None = None,
    settings: Mapping[str, str] = MappingProxyType({}),
    replication: bool = False,
    must_use_password: bool = False,
    timeout: float | None = None,
) -> Session:
    """connect(), and continue as a raw session. The same arguments and errors.

    Its client_encoding is what `settings` say. Else it is UTF8 for a walsender, and for others the database's own, so
    that the server converts nothing; a database in SQL_ASCII converts nothing ever. Raises ServerError (22023) where
    the server cannot convert.
    """
    settings = dict(settings)
    encoding = settings.pop("client_encoding", None)  # which need not be one that asyncpg knows
    connection = await connect(
        conninfo,
        application_name=application_name,
        settings=settings,
        replication=replication,
        must_use_password=must_use_password,
        timeout=timeout,
    )
    session = Session.take_over(connection)
    if encoding is None:
        own = session.parameters.get("server_encoding", "UTF8")
        encoding = own if own == "SQL_ASCII" or not replication else "UTF8"
    if encoding != session.encoding:
        try:
            await session.set_encoding(encoding)
        except BaseException as error:
            session.abort()
            if isinstance(error, ServerError):  # "invalid value", and why
                error.amend(error.detail or error.message, detail="")
                error.amend(
                    hint=f"Rows are sent in {encoding}. PostgreSQL converts nearly all encodings from and to UTF8."
                )
            raise
    return session


def _time_limit(parameters: Mapping[str, str], timeout: float | None) -> float | None:
    """Seconds for one attempt; None is no limit, which connect_timeout=0 asks for."""
    if "connect_timeout" not in parameters:
        return TIMEOUT if timeout is None else timeout
    given = integer("connect_timeout", parameters["connect_timeout"])
    if given <= 0:
        return timeout
    return float(given) if timeout is None else min(given, timeout)


async def _open_in_turn(
    attempts: Sequence[Callable[[], dict[str, object]]],
    target: HostSpec,
    arguments: dict[str, object],
    fewer: Mapping[str, str],
    limit: float | None,
    *,
    must_use_password: bool,
) -> tuple[asyncpg.Connection, bool]:
    """Open a session with the first attempt of encryption() that succeeds. The rest is as for _open().

    Another attempt follows if TLS has failed, or the server does not admit the role with or without TLS.
    """
    failures: list[SubscriberError] = []
    for encrypted in attempts:
        try:
            given = {**arguments, **encrypted()}
            return await _open(target, given, fewer, limit, must_use_password=must_use_password)
        except (ConninfoError, ConnectionLost, ConnectError) as error:
            failures.append(error)
            if not (isinstance(error, ConninfoError) or is_tls_failure(error) or is_not_admitted(error)):
                break
    last = failures[-1]
    if len(failures) > 1:
        last.amend("; ".join(libpq_message(failure) for failure in failures))
    raise last


async def _open(
    target: HostSpec,
    arguments: dict[str, object],
    fewer: Mapping[str, str],
    limit: float | None,
    *,
    must_use_password: bool,
) -> tuple[asyncpg.Connection, bool]:
    """Open a session. Returns True if it is on a pooler that has refused our settings, which are not set then.

    Args:
        target: the host.
        arguments: of asyncpg.connect().
        fewer: the parameters for a pooler, in place of those in `arguments`.
        limit: the time for one attempt, in seconds. None: there is none.
        must_use_password: as for connect().
    """
    if target not in _POOLERS:
        try:
            return await _attempt(target, arguments, limit, must_use_password=must_use_password), False
        except ConnectError as error:
            if not is_unsupported_parameter(error) or arguments["server_settings"] == fewer:
                raise
    arguments["server_settings"] = dict(fewer)
    connection = await _attempt(target, arguments, limit, must_use_password=must_use_password)
    _POOLERS.add(target)
    return connection, True


async def _attempt(
    target: HostSpec, arguments: dict[str, object], limit: float | None, *, must_use_password: bool
) -> asyncpg.Connection:
    watch = authentication.Watch() if must_use_password else None
    try:
        try:
            connection = await asyncpg.connect(**arguments, loop=watch, timeout=limit)  # type: ignore[call-overload]
        except asyncpg.FeatureNotSupportedError:  # this encoding cannot be converted to UTF8, as MULE_INTERNAL
            arguments["server_settings"] |= {"client_encoding": "SQL_ASCII"}  # type: ignore[operator]
            connection = await asyncpg.connect(**arguments, loop=watch, timeout=limit)  # type: ignore[call-overload]
    except Exception as error:  # a server that says something else than a server does makes asyncpg raise anything
        replication = "replication" in arguments["server_settings"]  # type: ignore[operator]
        raise translate(error, target, replication=replication) from error
    if watch is not None:
        if not watch.used_password:
            connection.terminate()
            raise authentication.not_requested()
        watch.release(connection)
    return connection  # type: ignore[no-any-return]


# --- what kind of session it is -------------------------------------------------------------------


async def _prepare(
    connection: asyncpg.Connection,
    attribute: str,
    parameters: Mapping[str, str],
    settings: Mapping[str, str],
    target: HostSpec,
) -> None:
    """Check and set up a new connection. Closes the connection if it raises."""
    try:
        await _check_session(connection, attribute, target)
        version = connection.get_server_version()
        if understood := known(settings, version.major * 10000 + version.minor):
            await connection.execute("; ".join(f"SET {name} = {literal(value)}" for name, value in understood.items()))
        _set_socket_options(connection, parameters)
        connection._protocol.get_settings().register_data_types(ARRAY_TYPES)  # type: ignore[attr-defined]
    except BaseException as error:
        connection.terminate()
        if isinstance(error, SubscriberError) or not isinstance(error, Exception):
            raise
        raise translate(error, target) from error  # a hostile server makes asyncpg raise anything


async def _check_session(connection: asyncpg.Connection, attribute: str, target: HostSpec) -> None:
    """Raise ConnectionLost if the session is not what target_session_attrs asks for."""
    if attribute == "any":
        return
    standby = await _setting(connection, "in_hot_standby", "pg_catalog.pg_is_in_recovery()")
    read_only = standby or await _setting(
        connection, "default_transaction_read_only", "current_setting('transaction_read_only')::bool"
    )
    complaint = {
        "read-write": "session is read-only" if read_only else "",
        "read-only": "" if read_only else "session is not read-only",
        "primary": "server is in hot standby mode" if standby else "",
        "standby": "" if standby else "server is not in hot standby mode",
    }[attribute]
    if complaint:
        raise ConnectionLost(target.failed() + complaint)


async def _setting(connection: asyncpg.Connection, reported: str, expression: str) -> bool:
    """Return a boolean parameter that servers report since PostgreSQL 14. On older servers `expression` is evaluated.

    A walsender supports simple queries only, and asyncpg does not return their rows. So the query divides by
    zero if the parameter is on.
    """
    value = getattr(connection.get_settings(), reported, None)
    if value is not None:
        return bool(value == "on")
    try:
        await connection.execute(f"SELECT 1 / (NOT {expression})::int")
    except asyncpg.DivisionByZeroError:
        return True
    return False


def _set_socket_options(connection: asyncpg.Connection, parameters: Mapping[str, str]) -> None:
    """TCP keepalives, on unless `keepalives=0`, and tcp_user_timeout. Nothing on a Unix socket."""
    sock = connection._transport.get_extra_info("socket")  # type: ignore[attr-defined]
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    options = {"tcp_user_timeout": "TCP_USER_TIMEOUT"}
    if integer("keepalives", parameters.get("keepalives", "1")) != 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options |= {
            "keepalives_idle": "TCP_KEEPIDLE",
            "keepalives_interval": "TCP_KEEPINTVL",
            "keepalives_count": "TCP_KEEPCNT",
        }
    for keyword, name in options.items():
        value = integer(keyword, parameters.get(keyword, "0"))
        number = getattr(socket, name, None)  # some systems lack some of these options
        if value > 0 and number is not None:
            sock.setsockopt(socket.IPPROTO_TCP, number, value)
