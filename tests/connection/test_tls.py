"""Certificates, keys and revocation lists, case by case beside libpq: the same server is reached, or not."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from subscriber.connection.connect import connect
from subscriber.errors import SubscriberError

OPENSSL = shutil.which("openssl")
pytestmark = pytest.mark.skipif(OPENSSL is None, reason="openssl is not installed")

# Clients of the system, whose libpq has TLS. That of the servers from PyPI has none.
PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin/psql"))
SSL_REQUEST = bytes.fromhex("0000000804d2162f")
ACCEPTED = (
    b"R\0\0\0\x08\0\0\0\0"
    + b"".join(
        b"S" + (len(pair) + 4).to_bytes(4, "big") + pair
        for pair in (b"server_version\x0015.0\0", b"client_encoding\0UTF8\0", b"server_encoding\0UTF8\0")
    )
    + b"Z\0\0\0\x05I"
)


def openssl(*arguments: str | Path, cwd: Path) -> None:
    assert OPENSSL is not None
    subprocess.run([OPENSSL, *map(str, arguments)], cwd=cwd, check=True, capture_output=True)


class Authority:
    """A certificate authority in a directory."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.certificate = folder / f"{name}.crt"
        subject = ("-subj", f"/CN={name}", "-days", "30", "-nodes")
        extensions = ("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=keyCertSign,cRLSign")
        new = ("req", "-x509", "-newkey", "rsa:2048", "-keyout", f"{name}.key", "-out", self.certificate)
        openssl(*new, *subject, *extensions, cwd=folder)

    def issue(self, name: str, common_name: str, alternatives: str = "", *, algorithm: str = "rsa:2048") -> None:
        """Write NAME.crt and NAME.key."""
        keys = ["-newkey", algorithm] + (["-pkeyopt", "ec_paramgen_curve:prime256v1"] if algorithm == "ec" else [])
        openssl(
            *("req", "-new", *keys, "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.csr"),
            *("-subj", f"/CN={common_name}" if common_name else "/O=nobody"),
            cwd=self.folder,
        )
        (self.folder / f"{name}.ext").write_text(f"subjectAltName={alternatives}\n" if alternatives else "\n")
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", self.certificate, "-CAkey", f"{self.name}.key"),
            *("-CAcreateserial", "-days", "30", "-extfile", f"{name}.ext", "-out", f"{name}.crt"),
            cwd=self.folder,
        )

    def revoke(self, certificate: str | None) -> Path:
        """Write a revocation list, with this certificate."""
        (self.folder / "index.txt").write_text("")
        (self.folder / "crlnumber").write_text("01")
        (self.folder / "ca.cnf").write_text(
            "[ca]\ndefault_ca=own\n[own]\ndatabase=index.txt\ncrlnumber=crlnumber\ndefault_md=sha256\n"
            "default_crl_days=30\n"
        )
        ca = ("ca", "-config", "ca.cnf", "-cert", self.certificate, "-keyfile", f"{self.name}.key")
        if certificate is not None:
            openssl(*ca, "-revoke", certificate, cwd=self.folder)
        openssl(*ca, "-gencrl", "-out", "list.crl", cwd=self.folder)
        return self.folder / "list.crl"


@contextmanager
def server(folder: Path, certificate: str) -> Iterator[tuple[int, list[str]]]:
    """Run a server that accepts every session. Yields its port, and how sessions have begun: "tls" or "plain"."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / f"{certificate}.crt", folder / f"{certificate}.key")
    begun: list[str] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(link: socket.socket) -> None:
        with link, suppress(OSError):
            link.settimeout(10)
            how, first = "plain", link.recv(8)
            if first == SSL_REQUEST:
                link.sendall(b"S")
                with context.wrap_socket(link, server_side=True) as secured:
                    if secured.recv(8192):
                        begun.append("tls")
                        secured.sendall(ACCEPTED)
                        secured.recv(8192)
                return
            begun.append(how)
            link.recv(8192)
            link.sendall(ACCEPTED)
            link.recv(8192)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1], begun
    finally:
        listener.close()


def libpq(program: Path, conninfo: str) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "LC_ALL": "C"}
    subprocess.run(
        [program, "-X", "-c", "SELECT 1", conninfo], env=environment, capture_output=True, timeout=30, check=False
    )


def compare(port: int, begun: list[str], parameters: str) -> str:
    """Connect with libpq and with this package. Returns how the session has begun; "refused": not at all."""
    conninfo = f"port={port} user=me dbname=d gssencmode=disable connect_timeout=10 {parameters}"
    outcomes = {}
    for program in PROGRAMS:
        begun.clear()
        libpq(program, conninfo)
        outcomes[str(program)] = begun[-1] if begun else "refused"
    begun.clear()

    async def ours() -> None:
        with suppress(SubscriberError):
            (await connect(conninfo.replace("gssencmode=disable", ""), timeout=10)).terminate()

    asyncio.run(ours())
    own = begun[-1] if begun else "refused"
    assert set(outcomes.values()) <= {own}, (outcomes, own, parameters)
    return own


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("PG")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def authority(folder: Path) -> Authority:
    return Authority(folder, "root")


NAMES = [
    ("127.0.0.1", "", "127.0.0.1", "tls"),
    ("", "DNS:127.0.0.1", "127.0.0.1", "tls"),
    ("other", "DNS:*.0.0.1", "127.0.0.1", "tls"),
    ("", "IP:127.0.0.1", "127.0.0.1", "tls"),
    ("", "IP:127.0.0.2", "127.0.0.1", "refused"),
    ("127.0.0.1", "IP:127.0.0.2", "127.0.0.1", "refused"),
    ("127.0.0.1", "DNS:other", "127.0.0.1", "tls"),
    ("", "IP:::1", "::1", "tls"),
    ("", "IP:::1", "0:0:0:0:0:0:0:1", "tls"),
    ("db", "", "db", "tls"),
    ("DB", "", "db", "tls"),
    ("db", "DNS:other", "db", "refused"),
    ("db", "IP:127.0.0.1", "db", "tls"),
    ("other", "DNS:first,DNS:db", "db", "tls"),
    ("*.localhost", "", "a.localhost", "tls"),
    ("", "DNS:*.localhost", "a.localhost", "tls"),
    ("", "DNS:*.example.com", "a.example.com", "tls"),
    ("", "DNS:*.EXAMPLE.com", "a.example.COM", "tls"),
    ("", "DNS:*.example.com", "a.b.example.com", "refused"),
    ("", "DNS:*.example.com", "example.com", "refused"),
    ("", "DNS:a*.example.com", "ab.example.com", "refused"),
    ("", "DNS:*", "db", "refused"),
    ("", "DNS:*.com", "example.com", "tls"),
    ("", "", "db", "refused"),
]


@pytest.mark.parametrize(("common_name", "alternatives", "host", "expected"), NAMES)
def test_host_names_of_certificates_are_verified_as_by_libpq(
    authority: Authority, common_name: str, alternatives: str, host: str, expected: str
) -> None:
    authority.issue("server", common_name, alternatives)
    with server(authority.folder, "server") as (port, begun):
        ours = f"host={host} hostaddr=127.0.0.1 sslrootcert={authority.certificate}"
        assert compare(port, begun, f"{ours} sslmode=verify-full") == expected
        assert compare(port, begun, f"{ours} sslmode=verify-ca") == "tls"


def test_a_host_is_needed_for_its_name(authority: Authority) -> None:
    authority.issue("server", "", "IP:127.0.0.1")
    with server(authority.folder, "server") as (port, begun):
        rest = f"sslrootcert={authority.certificate} sslmode=verify-full"
        assert compare(port, begun, f"hostaddr=127.0.0.1 {rest}") == "refused"
        assert compare(port, begun, f"host=127.0.0.1 {rest}") == "tls"


def test_revocation_lists_are_checked_as_by_libpq(authority: Authority) -> None:
    folder = authority.folder
    authority.issue("server", "localhost")
    with server(folder, "server") as (port, begun):
        ours = f"host=localhost hostaddr=127.0.0.1 sslmode=verify-full sslrootcert={authority.certificate}"
        for given in ("sslcrl=/no/list.crl", f"sslcrl={authority.revoke(None)}"):
            assert compare(port, begun, f"{ours} {given}") == "tls"
        assert compare(port, begun, f"{ours} sslcrldir=/no/directory") == "refused"
        revoked = authority.revoke("server.crt")
        assert compare(port, begun, f"{ours} sslcrl={revoked}") == "refused"
        (folder / ".postgresql").mkdir()
        shutil.copy(revoked, folder / ".postgresql" / "root.crl")
        assert compare(port, begun, ours) == "refused"
        assert compare(port, begun, f"{ours} sslcrl=/no/list.crl") == "tls"


@pytest.mark.parametrize("algorithm", ["rsa:2048", "ec", "ed25519"])
def test_client_keys_are_accepted_as_by_libpq(authority: Authority, algorithm: str) -> None:
    folder = authority.folder
    authority.issue("server", "localhost")
    authority.issue("client", "me", algorithm=algorithm)
    key = folder / "client.key"
    openssl("pkey", "-in", key, "-outform", "DER", "-out", "client.der", cwd=folder)
    openssl("pkcs8", "-topk8", "-nocrypt", "-in", key, "-outform", "DER", "-out", "client.p8", cwd=folder)
    openssl("pkey", "-in", key, "-aes128", "-passout", "pass:secret", "-out", "client.enc", cwd=folder)
    (folder / "both.pem").write_bytes((folder / "client.crt").read_bytes() + key.read_bytes())
    with server(folder, "server") as (port, begun):
        ours = "host=localhost hostaddr=127.0.0.1 sslmode=require"
        cases = [
            (f"sslcert=client.crt sslkey={name}{more}", mode, expected)
            for name, more in (("client.key", ""), ("client.der", ""), ("client.p8", ""))
            for mode, expected in (
                (0o600, "tls"),
                (0o644, "refused"),
                (0o640, "tls" if os.getuid() == 0 else "refused"),
            )
        ]
        cases += [
            ("sslcert=client.crt sslkey=client.enc sslpassword=secret", 0o600, "tls"),
            ("sslcert=client.crt sslkey=client.enc sslpassword=wrong", 0o600, "refused"),
            ("sslcert=client.crt sslkey=nosuch.key", 0o600, "refused"),
            ("sslcert=client.crt sslkey=server.key", 0o600, "refused"),
            ("sslcert=both.pem", 0o600, "refused"),
        ]
        for parameters, mode, expected in cases:
            for name in ("client.key", "client.der", "client.p8", "client.enc", "server.key"):
                (folder / name).chmod(mode)
            given = " ".join(
                f"{name}={folder / value}" if name in ("sslcert", "sslkey") else f"{name}={value}"
                for name, value in (parameter.split("=") for parameter in parameters.split())
            )
            assert compare(port, begun, f"{ours} {given}") == expected, given


def test_weaker_modes_of_tls_accept_the_servers_that_libpq_accepts(authority: Authority, tmp_path: Path) -> None:
    """A root certificate is used by each mode; without TLS, prefer continues in plain text."""
    authority.issue("server", "localhost")
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other", "other")
    with server(authority.folder, "server") as (port, begun):
        ours = "host=localhost hostaddr=127.0.0.1"
        for mode, root, expected in (
            ("disable", other, "plain"),
            ("allow", other, "plain"),
            ("prefer", authority, "tls"),
            ("prefer", other, "plain"),
            ("require", authority, "tls"),
            ("require", other, "refused"),
            ("verify-ca", other, "refused"),
        ):
            assert compare(port, begun, f"{ours} sslmode={mode} sslrootcert={root.certificate}") == expected, mode
        for mode, expected in (("allow", "plain"), ("prefer", "tls"), ("require", "tls"), ("verify-ca", "refused")):
            assert compare(port, begun, f"{ours} sslmode={mode}") == expected, mode
        (authority.folder / "root.key").chmod(0o644)
        unusable = f"{ours} sslmode=prefer sslcert={authority.certificate} sslkey={authority.folder / 'root.key'}"
        assert compare(port, begun, unusable) == "plain"
        (tmp_path / ".postgresql").mkdir()
        shutil.copy(other.certificate, tmp_path / ".postgresql" / "root.crt")
        for mode, expected in (("allow", "plain"), ("prefer", "plain"), ("require", "refused")):
            assert compare(port, begun, f"{ours} sslmode={mode}") == expected, mode


LOAD = """
import resource, sys
from subscriber.connection import tls
from subscriber.errors import ConninfoError
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    tls.context(dict(pair.split("=") for pair in sys.argv[1:]), "localhost")
except ConninfoError as error:
    print(error.message)
"""


@pytest.mark.parametrize("keyword", ["sslcert", "sslkey", "sslrootcert", "sslcrl"])
def test_a_file_without_an_end_is_not_read(authority: Authority, tmp_path: Path, keyword: str) -> None:
    """The owner of a subscription names the files, and one process runs the subscriptions of all owners."""
    os.mkfifo(tmp_path / "pipe")
    others = {"sslmode": "require", "sslrootcert": authority.certificate, "sslcert": authority.certificate}
    if keyword != "sslkey":
        del others["sslcert"]
    for file in ("/dev/zero", tmp_path / "pipe"):
        parameters = {**others, keyword: file}
        arguments = [f"{name}={value}" for name, value in parameters.items()]
        done = subprocess.run(
            [sys.executable, "-c", LOAD, *arguments], capture_output=True, text=True, timeout=20, check=True
        )
        assert ("not a regular file" in done.stdout) is (keyword in ("sslcert", "sslkey"))
