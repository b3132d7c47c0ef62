"""libpq's connection strings: `key=value` pairs and URIs.

    host=db.example.org port=5432 dbname=shop user=repl password='it''s not this simple'
    postgresql://repl:secret@a.example.org:5432,b.example.org/shop?sslmode=verify-full

Only reading and writing of the text is here. What an absent keyword means (environment, service file,
default) is for connect.py to find out, when it connects.

Source: src/interfaces/libpq/fe-connect.c, conninfo_parse() and conninfo_uri_parse_options().
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from subscriber.errors import ConninfoError

# Every keyword libpq 18 knows, in its order. What connecting cannot honour is refused there, by name.
KEYWORDS = (
    "service", "user", "password", "passfile", "channel_binding", "connect_timeout", "dbname", "host",
    "hostaddr", "port", "client_encoding", "options", "application_name", "fallback_application_name",
    "keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout",
    "sslmode", "sslnegotiation", "sslcompression", "sslcert", "sslkey", "sslcertmode", "sslpassword",
    "sslrootcert", "sslcrl", "sslcrldir", "sslsni", "requirepeer", "require_auth", "min_protocol_version",
    "max_protocol_version", "ssl_min_protocol_version", "ssl_max_protocol_version", "gssencmode",
    "krbsrvname", "gsslib", "gssdelegation", "replication", "target_session_attrs", "load_balance_hosts",
    "scram_client_key", "scram_server_key", "oauth_issuer", "oauth_client_id", "oauth_client_secret",
    "oauth_scope", "sslkeylogfile",
)  # fmt: skip

SECRETS = frozenset({"password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key"})
HIDDEN = "********"

URI_PREFIXES = ("postgresql://", "postgres://")

_BLANKS = " \t\n\v\f\r"  # C's isspace()
_HEX = frozenset("0123456789abcdefABCDEF")


@dataclass(frozen=True, slots=True, repr=False)
class Conninfo:
    """A connection string, taken apart. `repr()` is safe to log; `str()` is the whole thing."""

    parameters: Mapping[str, str]  # libpq's keyword -> value, only those that were given

    @classmethod
    def parse(cls, text: str) -> Conninfo:
        """Read a URI or a `key=value` string.

        Raises ConninfoError with the message libpq gives, without the "invalid connection string
        syntax: " that the server puts in front of it.
        """
        for prefix in URI_PREFIXES:
            if text.startswith(prefix):
                return cls(MappingProxyType(_UriParser(text).parse(len(prefix))))
        return cls(MappingProxyType(_parse_pairs(text)))

    def get(self, keyword: str, default: str = "") -> str:
        """A parameter's value; libpq takes an empty value for none, and so does this."""
        return self.parameters.get(keyword) or default

    def with_(self, **parameters: str) -> Conninfo:
        """The same with some parameters added or replaced."""
        for keyword in parameters:
            if keyword not in KEYWORDS:
                raise ConninfoError(f'invalid connection option "{keyword}"')
        return replace(self, parameters=MappingProxyType({**self.parameters, **parameters}))

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


def _quote(value: str) -> str:
    """Quotes only where they are needed, as a person would write it."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    if not value or any(c in _BLANKS for c in value) or escaped != value:
        return f"'{escaped}'"
    return value


def _store(parameters: dict[str, str], keyword: str, value: str) -> bool:
    """Remember one parameter; False when libpq has no such keyword."""
    if keyword == "requiressl":  # what sslmode was before PostgreSQL 8
        keyword, value = "sslmode", "require" if value.startswith("1") else "prefer"
    if keyword not in KEYWORDS:
        return False
    parameters.pop(keyword, None)  # the last one counts, also for the order
    parameters[keyword] = value
    return True


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
            raise ConninfoError(f'missing "=" after "{keyword}" in connection info string')
        position = _skip_blanks(text, position + 1)
        if text[position : position + 1] == "'":
            value, position = _quoted_value(text, position + 1)
        else:
            value, position = _plain_value(text, position)
        if not _store(parameters, keyword, value):
            raise ConninfoError(f'invalid connection option "{keyword}"')
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
    """postgresql://[user[:password]@][host][:port][,…][/dbname][?keyword=value[&…]]

    It reads what libpq reads and stumbles where libpq stumbles: this is not RFC 3986's grammar, most of
    all in that several hosts are allowed.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._parameters: dict[str, str] = {}

    def parse(self, position: int) -> dict[str, str]:
        """The parameters; `position` is where the prefix ends."""
        position = self._hosts(self._credentials(position))
        uri = self._uri
        if uri[position : position + 1] == "/":
            end = self._find("?", position + 1)
            self._store("dbname", uri[position + 1 : end])
            position = end
        if position < len(uri):
            self._query(uri[position + 1 :])
        return self._parameters

    def _find(self, stops: str, position: int) -> int:
        """Where the first of `stops` is, from `position` on; the end of the URI if none is there."""
        while position < len(self._uri) and self._uri[position] not in stops:
            position += 1
        return position

    def _store(self, keyword: str, value: str) -> None:
        if value:  # an empty part is no part: it leaves the default in force
            self._parameters[keyword] = _percent_decode(value, HIDDEN if keyword in SECRETS else value)

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
        return position

    def _ipv6(self, position: int) -> tuple[str, int]:
        uri = self._uri
        end = self._find("]", position)
        if end == len(uri):
            raise ConninfoError(
                f'end of string reached when looking for matching "]" in IPv6 host address in URI: "{_hide(uri)}"'
            )
        if end == position:
            raise ConninfoError(f'IPv6 host address may not be empty in URI: "{_hide(uri)}"')
        after = uri[end + 1 : end + 2]
        if after and after not in ":/?,":
            raise ConninfoError(
                f'unexpected character "{after}" at position {end + 2} in URI (expected ":" or "/"): "{_hide(uri)}"'
            )
        return uri[position:end], end + 1

    def _query(self, text: str) -> None:
        for pair in text.removesuffix("&").split("&") if text else ():
            keyword, separator, value = pair.partition("=")
            if not separator:
                raise ConninfoError(f'missing key/value separator "=" in URI query parameter: "{keyword}"')
            if "=" in value:
                raise ConninfoError(f'extra key/value separator "=" in URI query parameter: "{keyword}"')
            keyword = _percent_decode(keyword, keyword)
            value = _percent_decode(value, HIDDEN if keyword in SECRETS else value)
            if (keyword, value) == ("ssl", "true"):  # JDBC's way to say it
                keyword, value = "sslmode", "require"
            if not _store(self._parameters, keyword, value):
                raise ConninfoError(f'invalid URI query parameter: "{keyword}"')


def _hide(uri: str) -> str:
    """The URI as an error may show it: libpq shows all of it, we hide the password."""
    prefix, _, rest = uri.partition("://")
    at = rest.find("@")
    slash = rest.find("/")
    if at < 0 or 0 <= slash < at:
        return uri
    user, colon, _ = rest[:at].partition(":")
    return f"{prefix}://{user}{colon}{HIDDEN if colon else ''}{rest[at:]}"


def _percent_decode(text: str, shown: str) -> str:
    """One part of a URI without its percent-encoding and without blanks around it.

    `shown` is what an error may say of it. Decoded bytes that are not UTF-8 come as surrogate escapes.
    """
    stripped = text.strip(" ")
    decoded = bytearray()
    position = 0
    while position < len(stripped):
        character = stripped[position]
        if character == " ":
            raise ConninfoError(f'unexpected spaces found in "{shown}", use percent-encoded spaces (%20) instead')
        if character != "%":
            decoded += character.encode("utf-8", "surrogateescape")
            position += 1
            continue
        token = stripped[position + 1 : position + 3]
        if len(token) != 2 or not _HEX.issuperset(token):
            raise ConninfoError(f'invalid percent-encoded token: "{shown}"')
        if token == "00":
            raise ConninfoError(f'forbidden value %00 in percent-encoded value: "{shown}"')
        decoded.append(int(token, 16))
        position += 3
    return decoded.decode("utf-8", "surrogateescape")
