"""TLS as libpq does it.

The modes verify-ca and verify-full need a root certificate, and the others use one if there is its file. `allow` and
`prefer` continue in plain text if TLS fails. Without files, asyncpg does these two by itself (connect.py).

Files are treated as by libpq: a revocation list that does not exist is ignored, a key is PEM or DER, and a key that
other accounts can read is refused. Two files are errors that libpq ignores: a list that cannot be read, and a
certificate of the client that is named and does not exist.

Source: src/interfaces/libpq/fe-secure-openssl.c, initialize_SSL().
"""

from __future__ import annotations

import base64
import ssl
import stat
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from subscriber.connection.certificate_names import is_for, names_of
from subscriber.display import shell_word
from subscriber.errors import ConninfoError
from subscriber.remedy import Remedy
from subscriber.sqlstate import SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION

SYSTEM = "system"  # sslrootcert=system: the operating system's certificate authorities


class _Object(ssl.SSLObject):
    """The TLS of one connection, which verifies the name of the server before anything is sent."""

    def do_handshake(self) -> None:
        super().do_handshake()
        context = self.context
        if isinstance(context, _Context) and context.verified_name is not None:
            _verify_name(self.getpeercert() or {}, context.verified_name)


class _Context(ssl.SSLContext):
    """A context that sends and verifies another name than the one dialled: `host` when `hostaddr` is dialled."""

    sslobject_class = _Object
    server_name: str | None = None
    verified_name: str | None = None  # None: any certificate of a known authority is accepted

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


def uses_files(parameters: Mapping[str, str]) -> bool:
    """Return True if there is a root certificate, or a certificate of the client."""
    root, certificate = _root(parameters), parameters.get("sslcert") or default_file("postgresql.crt")
    has_certificate = bool(certificate) and parameters.get("sslcertmode") != "disable"
    return Path(root).is_file() if root and not has_certificate else has_certificate


def context(parameters: Mapping[str, str], host: str, address: str = "") -> ssl.SSLContext:
    """Create the TLS context for a mode that uses TLS.

    Args:
        parameters: connection parameters of libpq.
        host: the name of the server. verify-full requires that its certificate has it.
        address: `hostaddr`, to which the socket connects. Empty: it connects to `host`.

    Raises:
        ConninfoError: a file cannot be used, a protocol version does not exist, or verify-full has no host.
    """
    mode = parameters["sslmode"]
    result = _Context(ssl.PROTOCOL_TLS_CLIENT)
    result.check_hostname = False  # by _Object
    result.server_name = host if host and address else None
    if mode == "verify-full":
        if not host:
            raise ConninfoError(
                "host name must be specified for a verified SSL connection",
                sqlstate=SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION,
            )
        result.verified_name = host
    _load_authorities(result, parameters, mode)
    if parameters.get("sslcertmode") != "disable":
        _load_certificate(result, parameters)
    result.minimum_version = _version(parameters.get("ssl_min_protocol_version") or "TLSv1.2")
    if maximum := parameters.get("ssl_max_protocol_version"):
        result.maximum_version = _version(maximum)
    result.set_alpn_protocols(["postgresql"])
    return result


def _load_authorities(result: ssl.SSLContext, parameters: Mapping[str, str], mode: str) -> None:
    if parameters.get("sslrootcert") == SYSTEM:
        result.load_default_certs(ssl.Purpose.SERVER_AUTH)
        return
    root = _root(parameters)
    if not root or not Path(root).is_file():
        # Without a root certificate the weaker modes encrypt and accept any server; with one they act as verify-ca.
        if mode in ("verify-ca", "verify-full"):
            raise ConninfoError(
                f'root certificate file "{root or "~/.postgresql/root.crt"}" does not exist',
                hint="Either provide the file, use the system's trusted roots with sslrootcert=system, "
                "or change sslmode to disable server certificate verification.",
                sqlstate=SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION,
            )
        result.verify_mode = ssl.CERT_NONE
        return
    _load("root certificate file", root, lambda: result.load_verify_locations(cafile=root))
    crl = parameters.get("sslcrl") or ("" if parameters.get("sslcrldir") else default_file("root.crl"))
    directory = parameters.get("sslcrldir")
    has_list = bool(crl) and Path(crl).is_file()
    if has_list:
        _load("certificate revocation list file", crl, lambda: result.load_verify_locations(cafile=crl))
    if directory:
        _load("certificate revocation list directory", directory, lambda: result.load_verify_locations(None, directory))
        has_list = True
    if has_list:
        result.verify_flags |= ssl.VERIFY_CRL_CHECK_CHAIN


def _load_certificate(result: ssl.SSLContext, parameters: Mapping[str, str]) -> None:
    certificate = parameters.get("sslcert") or default_file("postgresql.crt")
    if not certificate:
        return
    if not Path(certificate).is_file():
        if not parameters.get("sslcert"):
            return
        # It is not read: a device or a pipe may have no end, and the owner of a subscription chooses the file.
        problem = "not a regular file" if Path(certificate).exists() else "No such file or directory"
        raise ConninfoError(
            f'could not read certificate file "{certificate}": {problem}',
            sqlstate=SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION,
        )
    key = parameters.get("sslkey") or default_file("postgresql.key") or "~/.postgresql/postgresql.key"
    _check_key(key)
    password = parameters.get("sslpassword") or ""

    def load() -> None:
        with _pem(Path(key)) as file:
            result.load_cert_chain(certificate, file, lambda: password)

    _load("certificate file", certificate, load)


def _check_key(key: str) -> None:
    """Refuse a key that is missing, or that other accounts can read."""
    try:
        status = Path(key).stat()
    except OSError:
        raise ConninfoError(
            f'certificate present, but not private key file "{key}"',
            sqlstate=SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION,
        ) from None
    others = stat.S_IWGRP | stat.S_IXGRP | stat.S_IRWXO if status.st_uid == 0 else stat.S_IRWXG | stat.S_IRWXO
    if not stat.S_ISREG(status.st_mode):
        raise ConninfoError(
            f'private key file "{key}" is not a regular file', sqlstate=SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION
        )
    if status.st_mode & others:
        raise ConninfoError(
            f'private key file "{key}" has group or world access',
            detail="Its permissions must be u=rw (0600) or less if the current user owns it, or u=rw,g=r (0640) or less"
            " if root does.",
            hint=Remedy("take them away", f"chmod 0600 {shell_word(key)}"),
            sqlstate=SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION,
        )


@contextmanager
def _pem(key: Path) -> Iterator[Path]:
    """Yield a file with the key as PEM, which Python's ssl module needs. A key in DER is converted for the block."""
    content = key.read_bytes()
    if b"-----BEGIN" in content:
        yield key
        return
    with TemporaryDirectory() as folder:  # which only this account can read
        file = Path(folder) / "key.pem"
        file.touch(mode=0o600)
        file.write_text(_armored(content))
        yield file


def _armored(key: bytes) -> str:
    """Return a key in DER as PEM. Its kind follows from the first elements of its structure."""
    numbers = _first_elements(key)
    # PKCS #8: version, algorithm; EC: version 1, octets of the key; RSA: version, modulus.
    kind = {0x30: "PRIVATE KEY", 0x04: "EC PRIVATE KEY"}.get(numbers[1] if len(numbers) > 1 else 0, "RSA PRIVATE KEY")
    lines = textwrap.wrap(base64.b64encode(key).decode(), 64)
    return "\n".join([f"-----BEGIN {kind}-----", *lines, f"-----END {kind}-----", ""])


def _first_elements(key: bytes) -> bytes:
    """Return the tags of the first two elements of a sequence in DER."""
    at = 2 + (key[1] & 0x7F if len(key) > 1 and key[1] & 0x80 else 0)
    if len(key) < at + 2:
        return b""
    after = at + 2 + key[at + 1]
    return key[at : at + 1] + key[after : after + 1]


def _verify_name(certificate: Mapping[str, Any], host: str) -> None:
    """Raise SSLCertVerificationError if the certificate is not for the host."""
    if is_for(certificate, host):
        return
    names = [name for _, name in names_of(certificate, host)]
    if not names:
        reason = "could not get server's host name from server certificate"
    else:
        others = f" (and {len(names) - 1} other name{'s' * (len(names) > 2)})" if len(names) > 1 else ""
        reason = f'server certificate for "{names[0]}"{others} does not match host name "{host}"'
    error = ssl.SSLCertVerificationError(1, reason)
    error.verify_message = reason
    raise error


def _root(parameters: Mapping[str, str]) -> str:
    return parameters.get("sslrootcert") or default_file("root.crt")


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
