"""The hosts that a connection string names, in the order they are tried.

Source: src/interfaces/libpq/fe-connect.c, pqConnectOptions2() and emitHostIdentityInfo().
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from subscriber.errors import ConninfoError
from subscriber.sqlstate import FEATURE_NOT_SUPPORTED, SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION

_SOCKET_DIRECTORIES = ("/var/run/postgresql", "/tmp")  # default socket directories of Debian and of PostgreSQL


@dataclass(frozen=True, slots=True)
class HostSpec:
    """One host to try."""

    host: str  # as given: a name, an address, or a socket directory
    port: int
    address: str = ""  # hostaddr: dialled in place of the host's name

    @property
    def is_socket(self) -> bool:
        return not self.address and self.host.startswith("/")

    @property
    def socket_path(self) -> str:
        return f"{self.host}/.s.PGSQL.{self.port}"

    @property
    def place(self) -> str:
        """The server in a sentence."""
        return (
            f'on socket "{self.socket_path}"'
            if self.is_socket
            else f'at "{self.address or self.host}", port {self.port}'
        )

    def failed(self, looked_up: str = "") -> str:
        """The beginning of libpq's message; `looked_up` is the address that a name turned out to be."""
        if self.is_socket:
            return f'connection to server on socket "{self.socket_path}" failed: '
        shown = self.address or self.host
        also = f" ({looked_up})" if looked_up and looked_up != shown and not self.address else ""
        return f'connection to server at "{shown}"{also}, port {self.port} failed: '


def targets(parameters: Mapping[str, str]) -> list[HostSpec]:
    """The hosts to try, in order, out of host, hostaddr and port.

    Raises ConninfoError if the lists do not fit together.
    """
    addresses = _elements(parameters.get("hostaddr"))
    hosts = _elements(parameters.get("host"))
    count = len(addresses) or len(hosts) or 1
    if hosts and len(hosts) != count:
        raise ConninfoError(
            f"could not match {len(hosts)} host names to {count} hostaddr values",
            sqlstate=SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION,
        )
    ports = _elements(parameters.get("port")) or [""]
    if len(ports) == 1:
        ports *= count
    if len(ports) != count:
        raise ConninfoError(
            f"could not match {len(ports)} port numbers to {count} hosts",
            sqlstate=SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION,
        )
    specs = []
    for host, address, text in zip(hosts or [""] * count, addresses or [""] * count, ports, strict=True):
        port = integer("port", text or "5432")
        if not 1 <= port <= 65535:
            raise ConninfoError(f'invalid port number: "{text}"', sqlstate=SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION)
        if host.startswith("@"):
            raise ConninfoError("sockets in the abstract namespace are not supported", sqlstate=FEATURE_NOT_SUPPORTED)
        specs.append(HostSpec(host if host or address else _default_directory(port), port, address))
    return specs


def _elements(text: str | None) -> list[str]:
    return text.split(",") if text else []


def _default_directory(port: int) -> str:
    for directory in _SOCKET_DIRECTORIES:
        if Path(f"{directory}/.s.PGSQL.{port}").exists():
            return directory
    return _SOCKET_DIRECTORIES[-1]


def integer(keyword: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConninfoError(
            f'invalid integer value "{text}" for connection option "{keyword}"',
            hint=f"Write {keyword} as a number.",
            sqlstate=SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION,
        ) from None
