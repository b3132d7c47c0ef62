"""The parameters of a connection string before a connection is opened."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from subscriber.connection import defaults
from subscriber.connection.connect import asyncpg_arguments, check, encryption
from subscriber.connection.conninfo import Conninfo
from subscriber.connection.hosts import HostSpec, targets
from subscriber.errors import ConninfoError
from subscriber.redaction import KEYWORDS


@pytest.fixture(autouse=True)
def _no_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide PG variables and the files in the home directory of the user who runs the tests."""
    for keyword in KEYWORDS:
        if name := defaults.variable(keyword):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("PGSERVICEFILE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def complete(text: str) -> dict[str, str]:
    return defaults.complete(Conninfo.parse(text))


def tried(text: str) -> list[tuple[str, str, int]]:
    return [(target.host, target.address, target.port) for target in targets(complete(text))]


def test_every_host_gets_its_port() -> None:
    assert tried("host=a") == [("a", "", 5432)]
    assert tried("host=a,b port=1") == [("a", "", 1), ("b", "", 1)]
    assert tried("host=a,b port=1,2") == [("a", "", 1), ("b", "", 2)]
    assert tried("host=a,b port=,2") == [("a", "", 5432), ("b", "", 2)]
    assert tried("postgresql://a:1,b/") == [("a", "", 1), ("b", "", 5432)]
    assert tried("host=a,b hostaddr=127.0.0.1,::1") == [("a", "127.0.0.1", 5432), ("b", "::1", 5432)]
    assert tried("hostaddr=127.0.0.1") == [("", "127.0.0.1", 5432)]


def test_no_host_is_the_local_socket() -> None:
    (target,) = targets(complete("port=59999"))
    assert target.is_socket
    assert target.failed() == 'connection to server on socket "/tmp/.s.PGSQL.59999" failed: '


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("host=a,b port=1,2,3", "could not match 3 port numbers to 2 hosts"),
        ("host=a,b hostaddr=127.0.0.1", "could not match 2 host names to 1 hostaddr values"),
        ("host=a port=0", 'invalid port number: "0"'),
        ("host=a port=65536", 'invalid port number: "65536"'),
        ("host=a port=x", 'invalid integer value "x" for connection option "port"'),
    ],
)
def test_lists_have_to_fit(text: str, message: str) -> None:
    with pytest.raises(ConninfoError) as caught:
        targets(complete(text))
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sslmode=x", 'invalid sslmode value: "x"'),
        ("target_session_attrs=x", 'invalid target_session_attrs value: "x"'),
        ("load_balance_hosts=x", 'invalid load_balance_hosts value: "x"'),
        ("sslnegotiation=x", 'invalid sslnegotiation value: "x"'),
        (
            "sslmode=prefer sslnegotiation=direct",
            'weak sslmode "prefer" may not be used with sslnegotiation=direct '
            '(use "require", "verify-ca", or "verify-full")',
        ),
        (
            "sslmode=require sslrootcert=system",
            'weak sslmode "require" may not be used with sslrootcert=system (use "verify-full")',
        ),
        ("channel_binding=require", 'connection option "channel_binding" cannot be honoured by this client'),
        ("require_auth=scram-sha-256", 'connection option "require_auth" cannot be honoured by this client'),
        ("gssencmode=require", 'connection option "gssencmode" cannot be honoured by this client'),
    ],
)
def test_an_unsupported_parameter_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ConninfoError) as caught:
        check(complete(text))
    assert caught.value.message == message


def test_options_that_need_nothing_of_us_are_taken() -> None:
    check(complete("channel_binding=prefer gssencmode=prefer sslsni=1 sslcertmode=allow krbsrvname=x oauth_scope=y"))


def test_the_environment_stands_in_for_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGHOST", "envhost")
    monkeypatch.setenv("PGUSER", "envuser")
    monkeypatch.setenv("PGAPPNAME", "envname")
    parameters = complete("user=me host=''")
    assert parameters["host"] == "envhost"
    assert parameters["user"] == "me"
    assert parameters["dbname"] == "me"
    assert parameters["application_name"] == "envname"


def test_system_roots_ask_for_full_verification() -> None:
    assert complete("sslrootcert=system")["sslmode"] == "verify-full"
    assert complete("")["sslmode"] == "prefer"


def test_a_service_stands_in_before_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".pg_service.conf").write_text(
        "# services\n[other]\nhost=wrong\n\n[mine]\nhost=servicehost\n  port=5499\ndbname=shop\n[more]\nhost=wrong\n"
    )
    monkeypatch.setenv("PGHOST", "envhost")
    parameters = complete("service=mine port=1")
    assert (parameters["host"], parameters["port"], parameters["dbname"]) == ("servicehost", "1", "shop")
    with pytest.raises(ConninfoError, match='definition of service "none" not found'):
        complete("service=none")


def test_a_damaged_service_file_says_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "services"
    file.write_text("[mine]\nhost=a\nnosuch=1\n")
    monkeypatch.setenv("PGSERVICEFILE", str(file))
    with pytest.raises(ConninfoError) as caught:
        complete("service=mine")
    assert caught.value.message == f'syntax error in service file "{file}", line 3'


PASSFILE = r"""
# hunter2 is in no comment
a:5432:shop:me:first
a:*:*:me:sec\:ond\\
*:5433:*:*:third
localhost:5432:*:me:local
"""


@pytest.mark.parametrize(
    ("host", "port", "expected"),
    [
        ("a", 5432, "first"),
        ("a", 5499, "sec:ond\\"),
        ("b", 5433, "third"),
        ("/var/run/postgresql", 5432, "local"),
        ("b", 5432, None),
    ],
)
def test_the_password_file_is_asked_host_by_host(tmp_path: Path, host: str, port: int, expected: str | None) -> None:
    file = tmp_path / "passwords"
    file.write_text(PASSFILE)
    file.chmod(0o600)
    parameters = complete(f"user=me dbname=shop passfile={file}")
    assert defaults.password(parameters, host, port) == expected


def test_a_password_file_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    file = tmp_path / ".pgpass"
    file.write_text("*:*:*:*:secret\n")
    file.chmod(0o644)
    assert defaults.password(complete("user=me"), "a", 5432) is None
    file.chmod(0o600)
    assert defaults.password(complete("user=me"), "a", 5432) == "secret"
    assert defaults.password(complete("user=me password=given"), "a", 5432) == "given"


def test_asyncpg_receives_the_parameters_of_the_connection_string() -> None:
    parameters = complete("user=me password=p dbname=shop sslmode=prefer ssl_max_protocol_version=TLSv1.2")
    told = asyncpg_arguments(parameters, HostSpec("a", 5433), {"x": "1"})
    (attempt,) = encryption(parameters, HostSpec("a", 5433))
    assert attempt() == {"dsn": "postgresql:///?sslmode=prefer&ssl_max_protocol_version=TLSv1.2"}
    assert (told["host"], told["port"], told["user"], told["database"]) == ("a", 5433, "me", "shop")
    assert told["password"] == "p"
    assert told["server_settings"] == {"x": "1"}


def test_a_socket_has_no_tls() -> None:
    (attempt,) = encryption(complete("user=me sslmode=verify-full"), HostSpec("/tmp", 5432))
    assert attempt() == {"ssl": "disable"}


def test_hostaddr_is_dialled_and_host_is_verified() -> None:
    parameters = complete("user=me sslmode=verify-full sslrootcert=system")
    target = HostSpec("db.example.org", 5432, "127.0.0.1")
    assert asyncpg_arguments(parameters, target, {})["host"] == "127.0.0.1"
    (attempt,) = encryption(parameters, target)
    context = attempt()["ssl"]
    assert isinstance(context, ssl.SSLContext)
    assert vars(context) == {"server_name": "db.example.org", "verified_name": "db.example.org"}


def test_a_missing_certificate_file_is_named() -> None:
    with pytest.raises(ConninfoError) as caught:
        encryption(complete("user=me sslmode=verify-ca"), HostSpec("a", 5432))[0]()
    assert caught.value.message == 'root certificate file "~/.postgresql/root.crt" does not exist'
    with pytest.raises(ConninfoError) as caught:
        encryption(complete("user=me sslmode=require sslcert=/no.pem"), HostSpec("a", 5432))[0]()
    assert caught.value.message == 'could not read certificate file "/no.pem": No such file or directory'
