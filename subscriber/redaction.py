"""Passwords in connection strings, hidden before a text that may quote one is shown. Pure.

    redact(text)              any text: a server's error, a traceback, a log record of a library
    redact_conninfo(text)     what was given as a connection string, however broken it is
    RedactedStatement(sql)    a statement, whose CONNECTION '…' may be broken anywhere; keeps track of positions

All of them find the same places:

    scheme://user:SECRET@host      up to the last @, because a password may have an unescaped @ or /
    scheme://user:SECRET           a port that is no number is a password whose @ is missing
    user:SECRET@host               a URI without its scheme
    password=SECRET                up to the next keyword of libpq, because a password may have an unquoted blank

They differ in where a place ends. A connection string is known from end to end, so everything doubtful is hidden. In
any other text a place ends with its line, and with the quotes around the connection string.

A text may be redacted again, which its way through errors and logs does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Every keyword libpq 18 knows, in its order.
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

Span = tuple[int, int]

# The end of a longer word counts too: PGPASSWORD=…, "sslpassword": "…". Others are of other programs, and misspelt.
_WORDS = "|".join(sorted({*SECRETS, "pass", "passwd", "passwort", "passphrase", "pw", "pwd", "secret"}))
_KEY = rf"(?:{_WORDS})(?:\s*=|['\"]\s*[:=]|:(?=\S))"
_NEXT = rf"[\s&](?:{'|'.join(KEYWORDS)})\s*="
# One slash where a URI was taken for a path.
_USER = r":/{1,2}[^\s:/?#'\"\[]{0,200}:"


def _compile(*patterns: str, flags: re.RegexFlag) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern, re.IGNORECASE | flags) for pattern in patterns)


_END = r"[\s,;:.&)\]}>]|$"  # what may follow a closing quote; a doubled one closes nothing
_QUOTED = rf"'(?:\\.|[^\\\n])*?'(?=[\"']|{_END})|\"(?:\\.|[^\\\n])*?\"(?=[\"']|{_END})"
_CLOSED = rf"'(?=\"|{_END})|\"(?='|{_END})"
_PORT_IN_TEXT = r"\d*(?=[/?,'\")\]}>\s]|[.;:](?:\s|\Z)|\Z)"
_IN_TEXT = _compile(
    # From the first colon of a word, which is not its scheme's, to the last @: atomic, so that it takes linear time.
    r"(?<!\S)(?>\S*?:(?://\S*?:|(?!//)))(?P<secret>\S*)@",
    rf"{_USER}(?!{_PORT_IN_TEXT})(?P<secret>[^'\"\n]{{1,200}})@",
    rf"{_USER}(?!{_PORT_IN_TEXT})(?P<secret>[^\s/?,'\"@]+)",
    rf"{_KEY}[^\S\n]*(?P<secret>\*{{8}}(?=[\"']|{_END})|{_QUOTED}|.*?(?={_NEXT}|{_CLOSED}|$))",
    flags=re.MULTILINE,
)

_PARTS = ("@", ":/", "pass", "pw", "secret", "scram_")  # a text without any of them has no secret

_PORT = r"\d*(?:[/?,]|\Z)"
_IN_CONNINFO = _compile(
    r"\A[^=]*?:(?://[^=]*?:|(?!//))(?P<secret>.*)@",
    r"://[^:/?#]*:(?P<secret>.*)@",
    rf"://[^:/?#\[]*:(?!{_PORT}|.*@)(?P<secret>[^/?]+)",
    r"password(?P<secret>[^\s=:&'\"]+)",
    rf"{_KEY}\s*(?P<secret>(?:'(?:\\.|[^\\])*?'(?=[\s']|\Z))?.*?(?={_NEXT}|\Z))",
    flags=re.DOTALL,
)

# The literals of a statement. One with anything else behind its closing quote was closed by a quote of a password.
_LITERAL = re.compile(r"'(?:[^'\\]|''|\\.)*+'(?![^\s;,)])|(\$\w*\$).*?\1(?![^\s;,)])|(?P<open>'|\$\w*\$).*", re.DOTALL)
_HIDES_LETTERS = re.compile(r"\\[0-9xuU]")  # an escape of a character that could be written as it is
_UESCAPE = re.compile(r"\s*uescape", re.IGNORECASE)
_CUT_OFF = re.compile(rf"{_KEY}\s*'\Z", re.IGNORECASE)
_CONNECTION = re.compile(r"\bconnection\s*(?:[en]|u&)?\Z", re.IGNORECASE)


def redact(text: str) -> str:
    """Hide what looks like a secret of a connection string in any text."""
    folded = text.lower()
    if not any(part in folded for part in _PARTS):
        return text
    return _hide(text, _find(_IN_TEXT, text))


def redact_conninfo(text: str) -> str:
    """Hide the secrets of a connection string, or of what was given in place of one."""
    return _hide(text, _find(_IN_CONNINFO, text))


def is_secret(piece: str, conninfo: str) -> bool:
    """Whether `piece`, which could not be read where it stands in `conninfo`, may be part of a secret."""
    doubtful = ":" in piece or (piece not in KEYWORDS and re.search(_WORDS, piece, re.IGNORECASE))
    return bool(doubtful) or piece not in redact_conninfo(conninfo)


class RedactedStatement:
    """A statement, and pieces of it, without the secrets of the connection strings in its literals."""

    def __init__(self, sql: str) -> None:
        self._sql = sql
        literals = list(_LITERAL.finditer(sql))
        spans = _find(_IN_TEXT, sql) + [span for literal in literals for span in _in_literal(literal)]
        if any(map(_is_cut_off, literals)):  # quotes do not say where a secret ends
            start = literals[0].start()
            spans += [(start + a, len(sql)) for a, _ in _find(_IN_CONNINFO, sql[start:])]
        self._spans = _merge(spans)

    def __str__(self) -> str:
        return _hide(self._sql, self._spans)

    def piece(self, start: int, end: int) -> str:
        """The part of the statement between two positions; HIDDEN stands for each part of a secret in it."""
        spans = [(max(a, start) - start, min(b, end) - start) for a, b in self._spans if a < end and b > start]
        return _hide(self._sql[start:end], spans)

    def position(self, position: int) -> int:
        """Where in str(self) that position of the statement is; of one within a secret, where HIDDEN begins."""
        outside = next((a for a, b in self._spans if a < position < b), position)
        return len(self.piece(0, outside))


def _in_literal(literal: re.Match[str]) -> list[Span]:
    start = literal.start()
    before = literal.string[max(0, start - 2) : start].lower()
    unicode = before == "u&" and ("\\" in literal[0] or _UESCAPE.match(literal.string, literal.end()))
    if unicode or (before.endswith("e") and _HIDES_LETTERS.search(literal[0])):
        return [(start + 1, literal.end() - 1)]  # escapes may spell the keyword
    return [(start + a, start + b) for a, b in _find(_IN_CONNINFO, literal[0].rstrip("'$"))]


def _is_cut_off(literal: re.Match[str]) -> bool:
    """Whether the literal may have ended within a secret."""
    if literal["open"] or _CUT_OFF.search(literal[0]):
        return True
    sql, start, end = literal.string, literal.start(), literal.end()
    return sql[end : end + 1] in (",", ")") and _CONNECTION.search(sql, max(0, start - 100), start) is not None


def _find(patterns: Iterable[re.Pattern[str]], text: str) -> list[Span]:
    return _merge([match.span("secret") for pattern in patterns for match in pattern.finditer(text)])


def _merge(spans: Iterable[Span]) -> list[Span]:
    """The same places in order, none of them empty or touching another one."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif start < end:
            merged.append((start, end))
    return merged


def _hide(text: str, spans: Iterable[Span]) -> str:
    pieces, end = [], 0
    for start, stop in spans:
        pieces += [text[end:start], HIDDEN]
        end = stop
    return "".join([*pieces, text[end:]])
