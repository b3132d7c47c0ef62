"""Connection strings in the forms that programs have: texts, URL objects, secrets, files, variables and functions.

    postgresql://…   host=… dbname=…     libpq's own, and SQLAlchemy's postgresql+driver://…
    @FILE                                the first line of a file that only its owner can read
    $NAME                                the environment variable NAME
    sqlalchemy.URL, pydantic.PostgresDsn, pydantic.SecretStr, and objects like these
    a function, or an async function     called for each new connection, for passwords that expire

Files, variables and functions are read again for each new connection. Only the program's own arguments can name a file
or a variable. The connection string of a subscription cannot: its owner may be a role that must not read files here.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from inspect import isawaitable
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

from subscriber.connection.conninfo import Conninfo, driver_parameters
from subscriber.connection.private_file import read_private_file
from subscriber.errors import ConninfoError
from subscriber.redaction import KEYWORDS
from subscriber.remedy import Remedy
from subscriber.sqlstate import UNDEFINED_OBJECT


class SecretText(Protocol):
    """A text that hides itself, such as pydantic's SecretStr."""

    def get_secret_value(self) -> str:
        """Return the text."""
        ...


class PydanticUrl(Protocol):
    """A URL such as pydantic's PostgresDsn."""

    def unicode_string(self) -> str:
        """Return the URL as text."""
        ...


class SqlalchemyUrl(Protocol):
    """A URL such as SQLAlchemy's, which `engine.url` and make_url() return."""

    @property
    def drivername(self) -> str: ...
    @property
    def username(self) -> str | None: ...
    @property
    def password(self) -> str | None: ...
    @property
    def host(self) -> str | None: ...
    @property
    def port(self) -> int | None: ...
    @property
    def database(self) -> str | None: ...
    @property
    def query(self) -> Mapping[str, str | tuple[str, ...]]: ...


_MASKED = "***"  # in the text of SQLAlchemy's URLs

FixedDsn: TypeAlias = str | SecretText | PydanticUrl | SqlalchemyUrl
Dsn: TypeAlias = FixedDsn | Callable[[], FixedDsn | Awaitable[FixedDsn]]


async def resolve_dsn(dsn: Dsn | Conninfo) -> Conninfo:
    """Return the connection string that `dsn` stands for.

    Raises:
        TypeError: `dsn`, or the result of the function, is none of the forms of this module.
        ConninfoError: the connection string is invalid, or its file or variable cannot be read.
    """
    if isinstance(dsn, Conninfo):
        return dsn
    if isinstance(dsn, str) and dsn.startswith(("@", "$")):
        return Conninfo(_parse(dsn).parameters, renew=partial(_renew, lambda: dsn))
    if callable(dsn):
        return Conninfo((await _renew(dsn)).parameters, renew=partial(_renew, dsn))
    return _parse(dsn)


async def _renew(function: Callable[[], FixedDsn | Awaitable[FixedDsn]]) -> Conninfo:
    answer = function()
    return _parse(await answer if isawaitable(answer) else answer)


def _parse(dsn: Any) -> Conninfo:
    match dsn:
        case str():
            conninfo = Conninfo.parse(read_named(dsn))
            if conninfo.parameters.get("password") == _MASKED:
                raise ConninfoError(
                    f'the password of the connection string is "{_MASKED}", which SQLAlchemy shows in place of it',
                    hint="Pass the URL itself, such as engine.url, and not its text.",
                )
            return conninfo
        case _ if callable(getattr(dsn, "get_secret_value", None)):
            return _parse(dsn.get_secret_value())
        case _ if callable(getattr(dsn, "unicode_string", None)):
            return _parse(dsn.unicode_string())
        case _ if hasattr(dsn, "drivername"):
            return _from_sqlalchemy(dsn)
    raise TypeError(f"a connection string is a text, a URL object or a function, not {type(dsn).__name__}")


def _from_sqlalchemy(url: SqlalchemyUrl) -> Conninfo:
    """Take over the parts. Their text would need escapes that SQLAlchemy does not write."""
    if url.drivername.partition("+")[0] not in ("postgresql", "postgres"):
        raise ConninfoError(
            f'database "{url.drivername}" is not supported', hint="The URL has to begin with postgresql://."
        )
    if "@" in (url.host or "") + (url.database or ""):
        raise ConninfoError(
            "invalid host or database in URL",
            hint='Percent-encode the special characters of a password: "@" as %40, ":" as %3A, "/" as %2F.',
        )
    password = url.password
    given = {
        "user": url.username,
        "password": None if password is None else str(password),
        "host": url.host,
        "port": None if url.port is None else str(url.port),
        "dbname": url.database,
    }
    parameters = {keyword: value for keyword, value in given.items() if value}
    pairs = [
        (keyword, value)
        for keyword, values in url.query.items()
        for value in ([values] if isinstance(values, str) else values)
    ]
    for keyword, value in driver_parameters(pairs):
        if keyword not in KEYWORDS:
            raise ConninfoError(f'invalid URI query parameter: "{keyword}"')
        parameters[keyword] = value
    return Conninfo(MappingProxyType(parameters))


def read_named(dsn: str) -> str:
    """Return the first line of FILE for @FILE, the variable NAME for $NAME, and other texts unchanged.

    Raises:
        ConninfoError: the file cannot be read, or users other than its owner may read it; or the variable is not set.
    """
    example = "'postgresql://user@host/database'"
    return _read(dsn, "connection string", f"echo {example}", f"export {{0}}={example}")


def read_named_password(password: str) -> str:
    """Return the password that @FILE or $NAME has, as read_named() does."""
    return _read(password, "password", "cat", "read -rs {0} && export {0}")


def _read(text: str, what: str, write: str, export: str) -> str:
    if text.startswith("@"):
        return _read_file(text[1:], what, write)
    if not text.startswith("$"):
        return text
    name = text[1:]
    if conninfo := os.environ.get(name):
        return conninfo
    raise ConninfoError(
        f'environment variable "{name}" is not set',
        hint=Remedy(command=export.format(name)) if name.isidentifier() else None,
        sqlstate=UNDEFINED_OBJECT,
    )


def _read_file(name: str, what: str, write: str) -> str:
    lines = read_private_file(name, what, write).splitlines()
    line = lines[0].strip() if lines else ""
    if not line:
        raise ConninfoError(f'{what} file "{name}" has nothing in its first line')
    return line
