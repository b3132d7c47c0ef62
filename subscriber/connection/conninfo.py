"""libpq's connection strings: `key=value` pairs and URIs.

    host=db.example.org port=5432 dbname=shop user=repl password='it''s not this simple'
    postgresql://repl:secret@a.example.org:5432,b.example.org/shop?sslmode=verify-full

SQLAlchemy's `postgresql+driver://…` is the same to parse(), without the parameters that configure the driver.

Only reading and writing of the text is here. What an absent keyword means (environment, service file,
default) is for connect.py to find out, when it connects.

Source: src/interfaces/libpq/fe-connect.c, conninfo_parse() and conninfo_uri_parse_options().
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from subscriber.display import near_word
from subscriber.errors import ConninfoError
from subscriber.redaction import HIDDEN, KEYWORDS, SECRETS, is_secret, redact_conninfo

URI_PREFIXES = ("postgresql://", "postgres://")
_OF_DRIVER = re.compile(r"postgres(?:ql)?\+\w+://")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_PORTS = re.compile(r"[0-9+,\s-]*")

_BLANKS = " \t\n\v\f\r"  # C's isspace()
_HEX = frozenset("0123456789abcdefABCDEF")


@dataclass(frozen=True, slots=True, repr=False)
class Conninfo:
    """A connection string, taken apart. `repr()` is safe to log; `str()` is the whole thing."""

    parameters: Mapping[str, str]  # libpq's keyword -> value, only those that were given
    # Returns the connection string again with a fresh password, for the next connection. None: it does not change.
    renew: Callable[[], Awaitable[Conninfo]] | None = field(default=None, compare=False)

    async def renewed(self) -> Conninfo:
        """Return the connection string for a new connection."""
        return self if self.renew is None else await self.renew()

    @classmethod
    def parse(cls, text: str) -> Conninfo:
        """Read a URI or a `key=value` string.

        Raises:
            ConninfoError: the text is invalid. The message is libpq's, without the "invalid connection string
                syntax: " that the server puts in front of it. Parts that may belong to a password are hidden.
        """
        for prefix in URI_PREFIXES:
            if text.startswith(prefix):
                return cls(MappingProxyType(_UriParser(text).parse(len(prefix))))
        if match := _OF_DRIVER.match(text):
            return cls(MappingProxyType(_UriParser(text, of_driver=True).parse(match.end())))
        if match := _SCHEME.match(text):
            raise ConninfoError(
                f'URI scheme "{match[1]}" is not supported',
                hint="Use postgresql://… in place of it, or key=value pairs.",
            )
        return cls(MappingProxyType(_parse_pairs(text)))

    def get(self, keyword: str, default: str = "") -> str:
        """A parameter's value; libpq takes an empty value for none, and so does this."""
        return self.parameters.get(keyword) or default

    def with_(self, **parameters: str) -> Conninfo:
        """The same with some parameters added or replaced."""
        for keyword in parameters:
            if keyword not in KEYWORDS:
                raise ConninfoError(f'invalid connection option "{keyword}"', hint=near_word(keyword, KEYWORDS))
        return replace(self, parameters=MappingProxyType({**self.parameters, **parameters}), renew=None)

    def __str__(self) -> str:
        """A `key=value` string that parse() reads back to the same parameters, secrets included."""
        return " ".join(f"{keyword}={_quote(value)}" for keyword, value in self.parameters.items())

    def redacted(self) -> str:
        """The `key=value` string with every secret replaced by asterisks, as PostgreSQL shows it."""
        return " ".join(
            f"{keyword}={HIDDEN if keyword in SECRETS else _quote(value)}" for keyword, value in self.parameters.items()
        )

    def __repr__(self) -> str:
        return f"Conninfo({self.redacted()!r})"


async def conninfo_text(conninfo: Conninfo | str) -> str:
    """Return a `key=value` string or URI for one connection, secrets included."""
    return conninfo if isinstance(conninfo, str) else str(await conninfo.renewed())


def _quote(value: str) -> str:
    """Quotes only where they are needed, as a person would write it."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    if not value or any(c in _BLANKS for c in value) or escaped != value:
        return f"'{escaped}'"
    return value


def _shown(piece: str, conninfo: str) -> str:
    """A piece of a connection string as an error may show it."""
    return HIDDEN if is_secret(piece, conninfo) else piece


def _store(parameters: dict[str, str], keyword: str, value: str) -> bool:
    """Remember one parameter; False when libpq has no such keyword."""
    if keyword == "requiressl":  # what sslmode was before PostgreSQL 8
        keyword, value = "sslmode", "require" if value.startswith("1") else "prefer"
    if keyword not in KEYWORDS:
        return False
    parameters.pop(keyword, None)  # the last one counts, also for the order
    parameters[keyword] = value
    return True


# Parameters of SQLAlchemy and of the drivers psycopg, asyncpg and pg8000, which have no effect on a connection of ours.
_DRIVER_PARAMETERS = frozenset({
    "async_fallback", "autocommit", "client_encoding", "command_timeout", "max_cacheable_statement_size",
    "max_cached_statement_lifetime", "prepare_threshold", "prepared_statement_cache_size",
    "prepared_statement_name_func", "statement_cache_size", "tcp_keepalive", "timeout",
})  # fmt: skip


def driver_parameters(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the parameters of a SQLAlchemy URL as libpq's, without those that configure the driver."""
    hosts: list[str] = []
    for keyword, value in pairs:
        match keyword:
            case "ssl":  # of asyncpg
                yield "sslmode", {"true": "require", "false": "disable"}.get(value.lower(), value)
            case "host":  # SQLAlchemy's form for several hosts: host=a:5432&host=b:5432
                hosts.append(value)
            case _ if keyword not in _DRIVER_PARAMETERS:
                yield keyword, value
    if hosts:
        parts = [host.rpartition(":") if re.search(r":\d+$", host) else (host, "", "") for host in hosts]
        yield "host", ",".join(host for host, _, _ in parts)
        if any(port for _, _, port in parts):
            yield "port", ",".join(port for _, _, port in parts)


# --- key=value ----------------------------------------------------------------------------------


def _parse_pairs(text: str) -> dict[str, str]:
    parameters: dict[str, str] = {}
    position = _skip_blanks(text, 0)
    while position < len(text):
        start = position
        while position < len(text) and text[position] != "=" and text[position] not in _BLANKS:
            position += 1
        keyword = text[start:position]
        position = _skip_blanks(text, position)
        if text[position : position + 1] != "=":
            raise ConninfoError(f'missing "=" after "{_shown(keyword, text)}" in connection info string')
        position = _skip_blanks(text, position + 1)
        if text[position : position + 1] == "'":
            value, position = _quoted_value(text, position + 1)
        else:
            value, position = _plain_value(text, position)
        if not _store(parameters, keyword, value):
            shown = _shown(keyword, text)
            raise ConninfoError(f'invalid connection option "{shown}"', hint=near_word(shown, KEYWORDS))
        position = _skip_blanks(text, position)
    return parameters


def _skip_blanks(text: str, position: int) -> int:
    while position < len(text) and text[position] in _BLANKS:
        position += 1
    return position


def _plain_value(text: str, position: int) -> tuple[str, int]:
    """Up to the next blank; a backslash keeps the character after it, and is lost at the very end."""
    value: list[str] = []
    while position < len(text) and text[position] not in _BLANKS:
        if text[position] == "\\":
            position += 1
        value.append(text[position : position + 1])
        position += 1
    return "".join(value), position


def _quoted_value(text: str, position: int) -> tuple[str, int]:
    """Up to the closing quote; `position` is after the opening one. A quote inside needs a backslash."""
    value: list[str] = []
    while position < len(text):
        if text[position] == "'":
            return "".join(value), position + 1
        if text[position] == "\\":
            position += 1
        value.append(text[position : position + 1])
        position += 1
    raise ConninfoError("unterminated quoted string in connection info string")


# --- URIs ---------------------------------------------------------------------------------------


class _UriParser:
    """Parse postgresql://[user[:password]@][host][:port][,…][/dbname][?keyword=value[&…]].

    It reads what libpq reads and stumbles where libpq stumbles: this is not RFC 3986's grammar, most of
    all in that several hosts are allowed.
    """

    def __init__(self, uri: str, *, of_driver: bool = False) -> None:
        """`of_driver`: the URI is SQLAlchemy's, which leaves blanks in a password and has parameters of the driver."""
        self._uri = uri.replace(" ", "%20") if of_driver else uri
        self._of_driver = of_driver
        self._parameters: dict[str, str] = {}

    def parse(self, position: int) -> dict[str, str]:
        """The parameters; `position` is where the prefix ends."""
        position = self._hosts(self._credentials(position))
        uri = self._uri
        if uri[position : position + 1] == "/":
            end = self._find("?", position + 1)
            is_password = (
                uri[position - 1] == ":" or "password" in self._parameters
            )  # user:/password@host, user:a@b/c@host
            if is_password and "@" in uri[position + 1 : end]:
                raise self._unencoded()
            self._store("dbname", uri[position + 1 : end])
            position = end
        if position < len(uri):
            self._query(uri[position + 1 :])
        return self._parameters

    def _find(self, stops: str, position: int) -> int:
        """Return the place of the first of `stops` from `position` on, or the end of the URI."""
        while position < len(self._uri) and self._uri[position] not in stops:
            position += 1
        return position

    def _store(self, keyword: str, value: str) -> None:
        if value:  # an empty part is no part: it leaves the default in force
            self._parameters[keyword] = self._percent_decode(value)

    def _credentials(self, position: int) -> int:
        at = self._find("@/", position)
        if self._uri[at : at + 1] != "@":
            return position
        user, _, password = self._uri[position:at].partition(":")
        self._store("user", user)
        self._store("password", password)
        return at + 1

    def _hosts(self, position: int) -> int:
        uri, hosts, ports = self._uri, [], []
        while True:
            if uri[position : position + 1] == "[":
                host, position = self._ipv6(position + 1)
            else:
                end = self._find(":/?,", position)
                host, position = uri[position:end], end
            hosts.append(host)
            port = ""
            if uri[position : position + 1] == ":":
                end = self._find("/?,", position + 1)
                port, position = uri[position + 1 : end], end
            ports.append(port)
            if uri[position : position + 1] != ",":
                break
            position += 1
        self._store("host", ",".join(hosts))
        self._store("port", ",".join(ports))
        if any("@" in host[1:] for host in hosts) or not _PORTS.fullmatch(self._parameters.get("port", "")):
            # libpq fails later, when it looks up the host, which sends part of a password to a name server.
            raise self._unencoded()
        return position

    def _unencoded(self) -> ConninfoError:
        """Return the error of a URI with a character that most likely belongs to the password."""
        return ConninfoError(
            f'invalid host or port in URI: "{redact_conninfo(self._uri)}"',
            hint='Percent-encode the special characters of a password: "@" as %40, ":" as %3A, "/" as %2F.',
        )

    def _ipv6(self, position: int) -> tuple[str, int]:
        uri = self._uri
        end = self._find("]", position)
        if end == len(uri):
            raise ConninfoError(
                'end of string reached when looking for matching "]" in IPv6 host address in URI: '
                f'"{redact_conninfo(uri)}"'
            )
        if end == position:
            raise ConninfoError(f'IPv6 host address may not be empty in URI: "{redact_conninfo(uri)}"')
        after = uri[end + 1 : end + 2]
        if after and after not in ":/?,":
            raise ConninfoError(
                f'unexpected character "{after}" at position {end + 2} in URI (expected ":" or "/"): '
                f'"{redact_conninfo(uri)}"'
            )
        return uri[position:end], end + 1

    def _query(self, text: str) -> None:
        pairs = self._pairs(text)
        for keyword, value in driver_parameters(pairs) if self._of_driver else pairs:
            if not _store(self._parameters, keyword, value):
                shown = self._shown(keyword)
                raise ConninfoError(f'invalid URI query parameter: "{shown}"', hint=near_word(shown, KEYWORDS))

    def _pairs(self, text: str) -> Iterator[tuple[str, str]]:
        for pair in text.removesuffix("&").split("&") if text else ():
            keyword, separator, value = pair.partition("=")
            if not separator:
                raise ConninfoError(f'missing key/value separator "=" in URI query parameter: "{self._shown(keyword)}"')
            if "=" in value:
                raise ConninfoError(
                    f'extra key/value separator "=" in URI query parameter: "{self._shown(keyword)}"',
                    hint='Separate the parameters of a URI by "&": ?keyword=value&keyword=value.',
                )
            keyword, value = self._percent_decode(keyword), self._percent_decode(value)
            if (keyword, value) == ("ssl", "true"):  # JDBC's way to say it
                keyword, value = "sslmode", "require"
            yield keyword, value

    def _shown(self, piece: str) -> str:
        return _shown(piece, self._uri)

    def _percent_decode(self, text: str) -> str:
        """Decode one part of the URI and strip blanks around it.

        Decoded bytes that are not UTF-8 become surrogate escapes.
        """
        stripped = text.strip(" ")
        decoded = bytearray()
        position = 0
        while position < len(stripped):
            character = stripped[position]
            if character == " ":
                raise ConninfoError(
                    f'unexpected spaces found in "{self._shown(text)}", use percent-encoded spaces (%20) instead'
                )
            if character != "%":
                decoded += character.encode("utf-8", "surrogateescape")
                position += 1
                continue
            token = stripped[position + 1 : position + 3]
            if len(token) != 2 or not _HEX.issuperset(token):
                raise ConninfoError(f'invalid percent-encoded token: "{self._shown(text)}"')
            if token == "00":
                raise ConninfoError(f'forbidden value %00 in percent-encoded value: "{self._shown(text)}"')
            decoded.append(int(token, 16))
            position += 3
        return decoded.decode("utf-8", "surrogateescape")
