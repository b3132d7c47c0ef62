"""Defaults of libpq for parameters that a connection string leaves out.

The order is: the service file's entry, the environment, a built-in default; for the password also the password file.
Every connection attempt reads them again, so a changed file takes effect at the next attempt.

Source: src/interfaces/libpq/fe-connect.c, conninfo_add_defaults(), parseServiceInfo(), passwordFromFile().
"""

from __future__ import annotations

import getpass
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from subscriber.connection.conninfo import Conninfo
from subscriber.errors import ConninfoError
from subscriber.redaction import KEYWORDS
from subscriber.sqlstate import SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION

# Every keyword has the variable PG<KEYWORD>, with these exceptions; None: it has none.
_VARIABLES: dict[str, str | None] = {
    "dbname": "PGDATABASE",
    "application_name": "PGAPPNAME",
    "connect_timeout": "PGCONNECT_TIMEOUT",
    "fallback_application_name": None,
    "keepalives": None,
    "keepalives_idle": None,
    "keepalives_interval": None,
    "keepalives_count": None,
    "tcp_user_timeout": None,
    "sslpassword": None,
    "replication": None,
    "scram_client_key": None,
    "scram_server_key": None,
    "oauth_issuer": None,
    "oauth_client_id": None,
    "oauth_client_secret": None,
    "oauth_scope": None,
    "sslkeylogfile": None,
}
_BUILT_IN = {"port": "5432", "target_session_attrs": "any", "load_balance_hosts": "disable"}

_ESCAPED = re.compile(r"\\(.)")
_FIELD = re.compile(r"((?:[^:\\]|\\.)*)(?::|$)")


def variable(keyword: str) -> str | None:
    """The environment variable that stands in for `keyword`; None if there is none."""
    if keyword in _VARIABLES:
        return _VARIABLES[keyword]
    return "PG" + keyword.replace("_", "").upper()


def complete(conninfo: Conninfo) -> dict[str, str]:
    """The connection string's parameters with everything filled in that can be known without a host.

    Empty values are left out, as libpq ignores them. `user`, `dbname`, `port` and `sslmode` are always there.
    Raises ConninfoError for a service that is not defined.
    """
    parameters = {keyword: value for keyword, value in conninfo.parameters.items() if value}
    if service := parameters.get("service") or os.environ.get("PGSERVICE"):
        parameters = {**_service(service), **parameters}
    for keyword in KEYWORDS:
        name = variable(keyword)
        if keyword not in parameters and name and os.environ.get(name):
            parameters[keyword] = os.environ[name]
    parameters = {**_BUILT_IN, **parameters}
    if "user" not in parameters:
        try:
            parameters["user"] = getpass.getuser()
        except (OSError, KeyError):
            raise ConninfoError(
                f"could not look up local user ID {os.getuid()}", sqlstate=SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION
            ) from None
    parameters.setdefault("dbname", parameters["user"])
    parameters.setdefault("sslmode", "verify-full" if parameters.get("sslrootcert") == "system" else "prefer")
    return parameters


def _service(name: str) -> dict[str, str]:
    if given := os.environ.get("PGSERVICEFILE"):
        files = [Path(given)]
        if not files[0].is_file():
            raise ConninfoError(
                f'service file "{given}" not found', sqlstate=SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION
            )
    else:
        home = os.environ.get("HOME")
        files = [Path(home) / ".pg_service.conf"] if home else []
    files.append(Path(os.environ.get("PGSYSCONFDIR", "/etc/postgresql-common")) / "pg_service.conf")
    for file in files:
        if file.is_file() and (entry := _service_entry(file, name)) is not None:
            return entry
    raise ConninfoError(
        f'definition of service "{name}" not found',
        hint=f"Write a section [{name}] with lines keyword=value to {files[0]}.",
        sqlstate=SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION,
    )


def _service_entry(file: Path, name: str) -> dict[str, str] | None:
    """The parameters under [name]; None if the file has no such section."""
    entry: dict[str, str] | None = None
    for number, line in enumerate(map(str.strip, file.read_text().splitlines()), 1):
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            if entry is not None:
                break
            if line.startswith(f"[{name}]"):
                entry = {}
        elif entry is not None:
            keyword, separator, value = line.partition("=")
            if not separator or keyword not in KEYWORDS:
                raise ConninfoError(
                    f'syntax error in service file "{file}", line {number}',
                    sqlstate=SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION,
                )
            if keyword == "service":
                raise ConninfoError(
                    f'nested "service" specifications not supported in service file "{file}", line {number}',
                    sqlstate=SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION,
                )
            entry.setdefault(keyword, value)
    return entry


def password(parameters: Mapping[str, str], host: str, port: int) -> str | None:
    """The password to use at one host: the given one, or the password file's; None if neither has one.

    `host` is the host's name as given, or its address, or a socket directory.
    """
    if given := parameters.get("password"):
        return given
    name = parameters.get("passfile")
    if name is None:
        home = os.environ.get("HOME")
        if not home:
            return None
        name = f"{home}/.pgpass"
    file = Path(name)
    try:
        mode = file.stat().st_mode
        # Others may read it, so it is not used; libpq does the same and only warns.
        if not stat.S_ISREG(mode) or mode & (stat.S_IRWXG | stat.S_IRWXO):
            return None
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    hosts = {host, "localhost"} if host.startswith("/") else {host}
    wanted = (hosts, {str(port)}, {parameters["dbname"]}, {parameters["user"]})
    for line in lines:
        fields = _FIELD.findall(line)
        if line.startswith("#") or len(fields) < 5:
            continue
        if all(field == "*" or _unescape(field) in values for field, values in zip(fields, wanted, strict=False)):
            return _unescape(fields[4])
    return None


def _unescape(field: str) -> str:
    return _ESCAPED.sub(r"\1", field)
