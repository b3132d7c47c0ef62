"""Whether a server has asked for the password and has got it: libpq's PQconnectionUsedPassword() for asyncpg.

**Purpose.** A subscription of a role that is no superuser must not connect with an identity of the operating system's
user who runs us: by peer or ident, with a certificate, with a Kerberos ticket. So its connection string has a
password, and the server has to ask for it. Only the authentication exchange shows that. What the server says
later on, as in `system_user`, is its own word.

**How.** asyncpg answers the server inside of compiled code and keeps no record. It makes all transports with three
methods of the event loop that it is given. asyncpg gets a Watch in place of the loop, and each of its protocols gets
a relay in front, which reads the server's requests on their way:

    plain, Unix socket, direct TLS   create_connection(factory): the relay is what `factory` gives
    negotiated TLS                   create_connection() for the SSLRequest, start_tls() if the server agrees; asyncpg
                                     calls set_protocol() of the transport, which puts the relay in between

**Invariants.** A request counts only before AuthenticationOk. SASL counts when the client has sent its proof, which
asyncpg does as soon as it has read AuthenticationSASLContinue. Each protocol starts from nothing: of two attempts of
`sslmode` prefer or allow, the last one decides. A watch that saw nothing says no.

**Source.** src/interfaces/libpq/fe-connect.c, PQconnectionUsedPassword(); fe-auth.c, pg_fe_sendauth();
src/backend/replication/libpqwalreceiver/libpqwalreceiver.c, libpqrcv_connect() and libpqrcv_check_conninfo().
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any

import asyncpg
import asyncpg.protocol

from subscriber.connection.conninfo import Conninfo
from subscriber.errors import PublisherError
from subscriber.sqlstate import PROHIBITED_SQL_STATEMENT_ATTEMPTED

# AuthenticationRequest messages, by their code.
_OK = 0
_CLEARTEXT_PASSWORD = 3
_MD5_PASSWORD = 5
_SASL_CONTINUE = 11
_ANSWERED_WITH_PASSWORD = (_CLEARTEXT_PASSWORD, _MD5_PASSWORD, _SASL_CONTINUE)

_HEADER = struct.Struct(">cI")
_CODE = struct.Struct(">I")
MAX_MESSAGE_BYTES = 65536  # of the authentication exchange; libpq takes 2000 for a request, 30000 for an error


def check_conninfo(conninfo: Conninfo) -> None:
    """Raise PublisherError (2F003) unless the connection string itself has a password."""
    if not conninfo.get("password"):
        raise PublisherError(
            "password is required",
            detail="Non-superusers must provide a password in the connection string.",
            sqlstate=PROHIBITED_SQL_STATEMENT_ATTEMPTED,
        )


def not_requested() -> PublisherError:
    """Return the error for a server that has not asked for the password."""
    return PublisherError(
        "password is required",
        detail="Non-superuser cannot connect if the server does not request a password.",
        hint="Target server's authentication method must be changed, "
        "or set password_required=false in the subscription parameters.",
        sqlstate=PROHIBITED_SQL_STATEMENT_ATTEMPTED,
    )


class Watch:
    """The event loop for one call of asyncpg.connect(); see the top of the file."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._relay: _Relay | None = None

    @property
    def used_password(self) -> bool:
        """Return True if the server of the last attempt asked for a password and asyncpg answered with one."""
        return self._relay is not None and self._relay.used_password

    def release(self, connection: asyncpg.Connection) -> None:
        """Take the relay out of a connection that is authenticated, and give the connection its event loop."""
        private: Any = connection
        transport = private._transport
        if isinstance(transport, _Transport):
            transport = private._transport = transport.real
        private._loop = self._loop
        transport.set_protocol(private._protocol)

    def relayed(self, protocol: asyncio.BaseProtocol) -> asyncio.BaseProtocol:
        """Return a relay for a protocol of asyncpg's that authenticates; any other protocol as it is."""
        if not isinstance(protocol, asyncpg.protocol.Protocol):
            return protocol
        self._relay = _Relay(protocol)
        return self._relay

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    async def create_connection(self, factory: Callable[[], Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return self._result(await self._loop.create_connection(lambda: self.relayed(factory()), *args, **kwargs))

    async def create_unix_connection(self, factory: Callable[[], Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return self._result(await self._loop.create_unix_connection(lambda: self.relayed(factory()), *args, **kwargs))

    def _result(self, made: tuple[Any, Any]) -> tuple[Any, Any]:
        transport, protocol = made
        if isinstance(protocol, _Relay):
            return transport, protocol.protocol
        return _Transport(self, transport), protocol

    async def start_tls(self, transport: Any, *args: Any, **kwargs: Any) -> Any:
        real = await self._loop.start_tls(transport.real, *args, **kwargs)
        return None if real is None else _Transport(self, real)


class _Transport:
    """A transport on which asyncpg replaces the protocol of the SSLRequest by the one that authenticates."""

    def __init__(self, watch: Watch, real: Any) -> None:
        self.real = real
        self._watch = watch

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.real.set_protocol(self._watch.relayed(protocol))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class _Relay(asyncio.Protocol):
    """Forwards all calls to `protocol`, and records the server's authentication requests until AuthenticationOk."""

    def __init__(self, protocol: Any) -> None:
        self.protocol = protocol
        self.used_password = False
        self._unread: bytearray | None = bytearray()  # None: the exchange is over, or cannot be read

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._read(data)
        self.protocol.data_received(data)

    def eof_received(self) -> bool | None:
        answer: bool | None = self.protocol.eof_received()
        return answer

    def connection_lost(self, exc: Exception | None) -> None:
        self.protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self.protocol.pause_writing()

    def resume_writing(self) -> None:
        self.protocol.resume_writing()

    def _read(self, data: bytes) -> None:
        if self._unread is None:
            return
        self._unread += data
        while len(self._unread) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._unread)
            if not _CODE.size <= length <= MAX_MESSAGE_BYTES:
                self._unread = None
                return
            if len(self._unread) < 1 + length:
                return
            if kind == b"R" and length >= 2 * _CODE.size:
                (code,) = _CODE.unpack_from(self._unread, _HEADER.size)
                if code == _OK:
                    self._unread = None
                    return
                self.used_password = self.used_password or code in _ANSWERED_WITH_PASSWORD
            del self._unread[: 1 + length]
