"""TLS as libpq does it, for the modes that insist on it: require, verify-ca and verify-full.

`allow` and `prefer` verify nothing and fall back to plain text; asyncpg does those by itself.

Source: src/interfaces/libpq/fe-secure-openssl.c, initialize_SSL().
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from subscriber.errors import ConninfoError
from subscriber.sqlstate import SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION

SYSTEM = "system"  # sslrootcert=system: the operating system's certificate authorities


class _Context(ssl.SSLContext):
    """A context that can verify another name than the one dialled: `host` when `hostaddr` is dialled."""

    server_name: str | None = None

    def wrap_bio(
        self, incoming: Any, outgoing: Any, server_side: bool = False, server_hostname: Any = None, session: Any = None
    ) -> ssl.SSLObject:
        name = self.server_name or server_hostname
        return super().wrap_bio(incoming, outgoing, server_side=server_side, server_hostname=name, session=session)


def default_file(name: str) -> str:
    """The path of one of libpq's default files in ~/.postgresql, or "" if it is not there."""
    try:
        path = Path.home() / ".postgresql" / name
        return str(path) if path.is_file() else ""
    except (RuntimeError, OSError):
        return ""


def context(parameters: Mapping[str, str], server_name: str | None) -> ssl.SSLContext:
    """Create the TLS context for `sslmode` require, verify-ca or verify-full.

    Args:
        parameters: connection parameters of libpq.
        server_name: the name that the certificate must contain, if the socket connects to another one; else None.

    Raises:
        ConninfoError: a file cannot be used, or a protocol version does not exist.
    """
    mode = parameters["sslmode"]
    result = _Context(ssl.PROTOCOL_TLS_CLIENT)
    result.server_name = server_name
    result.check_hostname = mode == "verify-full"
    _load_authorities(result, parameters, mode)
    if parameters.get("sslcertmode") != "disable":
        _load_certificate(result, parameters)
    result.minimum_version = _version(parameters.get("ssl_min_protocol_version") or "TLSv1.2")
    if maximum := parameters.get("ssl_max_protocol_version"):
        result.maximum_version = _version(maximum)
    result.set_alpn_protocols(["postgresql"])
    return result


def _load_authorities(result: ssl.SSLContext, parameters: Mapping[str, str], mode: str) -> None:
    given = parameters.get("sslrootcert", "")
    if given == SYSTEM:
        result.load_default_certs(ssl.Purpose.SERVER_AUTH)
        return
    root = given or default_file("root.crt")
    if not root or (mode == "require" and not Path(root).is_file()):
        # Without a root certificate `require` encrypts and accepts any server; with one it acts as verify-ca.
        if mode != "require":
            raise ConninfoError(
                f'root certificate file "{given or "~/.postgresql/root.crt"}" does not exist',
                hint="Either provide the file, use the system's trusted roots with sslrootcert=system, "
                "or change sslmode to disable server certificate verification.",
                sqlstate=SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION,
            )
        result.check_hostname, result.verify_mode = False, ssl.CERT_NONE
        return
    _load("root certificate file", root, lambda: result.load_verify_locations(cafile=root))
    crl = parameters.get("sslcrl") or ("" if parameters.get("sslcrldir") else default_file("root.crl"))
    directory = parameters.get("sslcrldir")
    if crl:
        _load("certificate revocation list file", crl, lambda: result.load_verify_locations(cafile=crl))
    if directory:
        _load("certificate revocation list directory", directory, lambda: result.load_verify_locations(None, directory))
    if crl or directory:
        result.verify_flags |= ssl.VERIFY_CRL_CHECK_CHAIN


def _load_certificate(result: ssl.SSLContext, parameters: Mapping[str, str]) -> None:
    certificate = parameters.get("sslcert") or default_file("postgresql.crt")
    if not certificate:
        return
    key = parameters.get("sslkey") or default_file("postgresql.key") or None
    password = parameters.get("sslpassword") or ""
    _load("certificate file", certificate, lambda: result.load_cert_chain(certificate, key, lambda: password))


def _load(what: str, path: str, load: Any) -> None:
    try:
        load()
    except ssl.SSLError as error:
        raise ConninfoError(
            f'could not read {what} "{path}": {error.reason or error}',
            sqlstate=SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION,
        ) from None
    except OSError as error:
        raise ConninfoError(
            f'could not read {what} "{path}": {error.strerror}', sqlstate=SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION
        ) from None


def _version(name: str) -> ssl.TLSVersion:
    versions = {"TLSv1": "TLSv1", "TLSv1.1": "TLSv1_1", "TLSv1.2": "TLSv1_2", "TLSv1.3": "TLSv1_3"}
    if name not in versions:
        raise ConninfoError(f'invalid SSL protocol version: "{name}"')
    return ssl.TLSVersion[versions[name]]
