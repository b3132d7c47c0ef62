"""Redaction of passwords in connection strings, before a text that may contain one is displayed.

    redact(text)              any text: a server's error, a traceback, a log record of a library
    redact_conninfo(text)     a connection string, which may be invalid
    RedactedStatement(sql)    a statement, whose CONNECTION '…' may be invalid; it also converts positions

Purpose. All of these find the same secrets:

    scheme://user:SECRET@host      up to the last @, because a password may have an unescaped @ or /
    scheme://user:SECRET           a port that is not a number is a password without its @
    user:SECRET@host               a URI without its scheme
    password=SECRET                up to the next keyword of libpq, because a password may have an unquoted space

They differ in the end of a secret. The limits of a connection string are known, so all doubtful parts are hidden. In
other text a secret ends with its line, or with the quotes around the connection string.

A redacted text can be redacted again. That happens to texts on their way through errors and logs.

Invariant. The time is linear in the length of the text, whatever its characters are. Servers and table owners choose
texts, and the event loop waits. So no pattern with an unlimited repetition is tried at every character up to the end of
the text. The two searches that would do so are methods of _Text, which keeps what it has found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

# The keywords of libpq 18, in its order.
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

# They are found at the end of longer words too: PGPASSWORD=…, "sslpassword": "…". Those that libpq does not have are
# keywords of other programs, and misspelled ones.
_WORDS = "|".join(sorted({*SECRETS, "pass", "passwd", "passwort", "passphrase", "pw", "pwd", "secret"}))
_WORDS += "|pa?ss?(?:w[ord]{0,4}|[ord]{2,4})"  # pasword, pssword, passwrd, …
_KEY = rf"(?:{_WORDS})(?:\s*=|['\"]\s*[:=]|:(?=\S))"
_NEXT = rf"[\s&](?:{'|'.join(KEYWORDS)})\s*="
# One slash if a program has normalized the URI like a path.
_USER = r":/{1,2}[^\s:/?#'\"\[]{0,200}:"


def _compile(*patterns: str) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern, re.IGNORECASE | re.MULTILINE) for pattern in patterns)


_END = r"[\s,;:.&)\]}>]|$"  # characters that can follow a closing quote; a doubled quote does not close
_CLOSED = rf"(?<!\\)(?:'(?=\"|{_END})|\"(?='|{_END}))"
_PORT_IN_TEXT = r"\d*(?=[/?,'\")\]}>\s]|[.;:](?:\s|\Z)|\Z)"
_URI_IN_TEXT = _compile(
    # From the first colon of a word, except for the scheme's, to the last @. The group is atomic, for linear time.
    r"(?<!\S)(?>\S*?:(?://\S*?:|(?!//)))(?P<secret>\S*)@",
    rf"{_USER}(?!{_PORT_IN_TEXT})(?P<secret>[^'\"\n]{{1,200}})@",
    rf"{_USER}(?!{_PORT_IN_TEXT})(?P<secret>[^\s/?,'\"@]+)",
)

# A keyword that libpq does not have. It may be a misspelled one.
_UNKNOWN = rf"(?:\A|[\s?&])(?!(?:{'|'.join(KEYWORDS)})\s*=)[^\s=&?:/@'\"]{{1,40}}\s*="
_PORT = r"\d*(?:[/?,]|\Z)"
# The first two end at the last @ of the text, and the third begins behind it.
_AT_FIRST, _AT_URI, _NO_AT, _MISSPELLED = _compile(
    r"\A(?>[^=]*?:(?://[^=]*?:|(?!//)))(?P<secret>(?s:.*))@",
    r"://[^:/?#]*:(?P<secret>(?s:.*))@",
    rf"://[^:/?#\[]*:(?!{_PORT})(?=(?P<secret>[^/?]+))",
    r"password(?P<secret>[^\s=:&'\"]+)",
)


@dataclass(frozen=True, slots=True)
class _Syntax:
    """The characters at which values of keywords begin and end.

    Attributes:
        keys: patterns of a keyword with its equals sign and the blanks behind it.
        hidden: a value that is hidden already, with its end. None: it is like other values.
        start: the quotes that a password begins with. They are no closing quotes: the password of a quoted string is
            rarely empty.
        end: the end of a value that has no quotes.
        closing: by quote, the closing quote as group `quote`, or the place behind which there is none.
        ends_closed: a value ends with its closing quote. False: it ends with the next keyword.
    """

    keys: tuple[re.Pattern[str], ...]
    hidden: re.Pattern[str] | None
    start: re.Pattern[str]
    end: re.Pattern[str]
    closing: dict[str, re.Pattern[str]]
    ends_closed: bool


_UNESCAPED = r"(?<!\\)(?:\\\\)*"
_KEY_IN_TEXT, _HIDDEN_IN_TEXT, _START_IN_TEXT, _END_IN_TEXT, _SINGLE, _DOUBLE = _compile(
    rf"{_KEY}[^\S\n]*",
    rf"\*{{8}}(?=[\"']|{_END})",
    r"['\"]{0,3}",
    rf"{_NEXT}|{_CLOSED}|$",
    rf"{_UNESCAPED}(?P<quote>')(?=[\"']|{_END})|\n",
    rf"{_UNESCAPED}(?P<quote>\")(?=[\"']|{_END})|\n",
)
_UNKNOWN_KEY, _KNOWN_KEY, _START, _END_IN_CONNINFO, _CLOSING = _compile(
    rf"{_UNKNOWN}\s*", rf"{_KEY}\s*", r"", rf"{_NEXT}|\Z", rf"{_UNESCAPED}(?P<quote>')(?=[\s']|\Z)"
)
_IN_TEXT = _Syntax(
    (_KEY_IN_TEXT,), _HIDDEN_IN_TEXT, _START_IN_TEXT, _END_IN_TEXT, {"'": _SINGLE, '"': _DOUBLE}, ends_closed=True
)
_IN_CONNINFO = _Syntax((_UNKNOWN_KEY, _KNOWN_KEY), None, _START, _END_IN_CONNINFO, {"'": _CLOSING}, ends_closed=False)

_PARTS = ("@", ":/", "pas", "ps", "pw", "secret", "scram_")  # a text that contains none has no secret

# The literals of a statement. If other characters follow the closing quote, that quote belongs to a password.
_LITERAL = re.compile(r"'(?:[^'\\]|''|\\.)*+'(?![^\s;,)])|(\$\w*\$).*?\1(?![^\s;,)])|(?P<open>'|\$\w*\$).*", re.DOTALL)
_HIDES_LETTERS = re.compile(r"\\[0-9xuU]")  # an escape that can represent a letter
_UESCAPE = re.compile(r"\s*uescape", re.IGNORECASE)
_CUT_OFF = re.compile(rf"{_KEY}\s*'\Z", re.IGNORECASE)
_CONNECTION = re.compile(r"\bconnection\s*(?:[en]|u&)?\Z", re.IGNORECASE)


def redact(text: str) -> str:
    """Hide in any text the parts that may be secrets of a connection string."""
    folded = text.lower()
    if not any(part in folded for part in _PARTS):
        return text
    return _hide(text, _in_text(text))


def redact_conninfo(text: str) -> str:
    """Hide the secrets of a connection string, which may be invalid."""
    return _hide(text, _in_conninfo(text))


def is_secret(piece: str, conninfo: str) -> bool:
    """Return True if `piece`, a part of `conninfo` that could not be parsed, may be part of a secret."""
    doubtful = ":" in piece or (piece not in KEYWORDS and re.search(_WORDS, piece, re.IGNORECASE))
    return bool(doubtful) or piece not in redact_conninfo(conninfo)


class RedactedStatement:
    """A statement without the secrets of the connection strings in its literals. str() returns its text."""

    def __init__(self, sql: str) -> None:
        self._sql = sql
        literals = list(_LITERAL.finditer(sql))
        spans = _in_text(sql) + [span for literal in literals for span in _in_literal(literal)]
        if any(map(_is_cut_off, literals)):  # the end of a secret is unknown, so the rest of the statement is hidden
            start = literals[0].start()
            spans += [(start + a, len(sql)) for a, _ in _in_conninfo(sql[start:])]
        self._spans = _merge(spans)

    def __str__(self) -> str:
        return _hide(self._sql, self._spans)

    def piece(self, start: int, end: int) -> str:
        """Return the part of the statement between two positions, with HIDDEN in place of each part of a secret."""
        spans = [(max(a, start) - start, min(b, end) - start) for a, b in self._spans if a < end and b > start]
        return _hide(self._sql[start:end], spans)

    def position(self, position: int) -> int:
        """Return the offset in str(self) of a position in the statement. Inside a secret: the offset of HIDDEN."""
        outside = next((a for a, b in self._spans if a < position < b), position)
        return len(self.piece(0, outside))


def _in_literal(literal: re.Match[str]) -> list[Span]:
    start = literal.start()
    before = literal.string[max(0, start - 2) : start].lower()
    unicode = before == "u&" and ("\\" in literal[0] or _UESCAPE.match(literal.string, literal.end()))
    if unicode or (before.endswith("e") and _HIDES_LETTERS.search(literal[0])):
        return [(start + 1, literal.end() - 1)]  # the keyword may be written with escapes
    return [(start + a, start + b) for a, b in _in_conninfo(literal[0].rstrip("'$"))]


def _is_cut_off(literal: re.Match[str]) -> bool:
    """Return True if the literal may have ended inside a secret."""
    if literal["open"] or _CUT_OFF.search(literal[0]):
        return True
    sql, start, end = literal.string, literal.start(), literal.end()
    return sql[end : end + 1] in (",", ")") and _CONNECTION.search(sql, max(0, start - 100), start) is not None


def _in_text(text: str) -> list[Span]:
    spans = [match.span("secret") for pattern in _URI_IN_TEXT for match in pattern.finditer(text)]
    return _merge([*spans, *_Text(text, _IN_TEXT).values()])


def _in_conninfo(text: str) -> list[Span]:
    last_at = text.rfind("@")
    first = _AT_FIRST.match(text), _AT_URI.search(text, 0, last_at + 1)
    spans = [match.span("secret") for match in (*first, *_MISSPELLED.finditer(text)) if match is not None]
    spans += [match.span("secret") for match in _NO_AT.finditer(text) if match.start("secret") > last_at]
    return _merge([*spans, *_Text(text, _IN_CONNINFO).values()])


@dataclass(slots=True)
class _Text:
    """The values of keywords in a text."""

    text: str
    syntax: _Syntax
    # By quote, the last search for a closing quote: its start, its end, and whether it has found one.
    searched: dict[str, tuple[int, int, bool]] = field(default_factory=dict)

    def values(self) -> Iterator[Span]:
        """Yield the values of all keywords that may be secrets. A value has no further keyword in it."""
        for key in self.syntax.keys:
            end = 0
            while match := key.search(self.text, end):
                start = match.end()
                end = self._end_of_value(start)
                yield start, end

    def _end_of_value(self, start: int) -> int:
        syntax, text = self.syntax, self.text
        if syntax.hidden is not None and (hidden := syntax.hidden.match(text, start)):
            return hidden.end()
        end = self._end_of_quotes(start)
        if end is None or not syntax.ends_closed:
            after = syntax.start.match(text, start if end is None else end)
            match = syntax.end.search(text, start if after is None else after.end())
            end = len(text) if match is None else match.start()
        return end

    def _end_of_quotes(self, start: int) -> int | None:
        """Return the end of a quoted value that starts there. None: it has no quotes, or they are not closed."""
        quote = self.text[start : start + 1]
        closing = self.syntax.closing.get(quote)
        if closing is None:
            return None
        since, end, is_closed = self.searched.get(quote, (0, 0, False))
        if not since <= start + 1 < end:
            match = closing.search(self.text, start + 1)
            end = len(self.text) + 1 if match is None else match.end()
            is_closed = match is not None and match["quote"] is not None
            self.searched[quote] = start + 1, end, is_closed
        return end if is_closed else None


def _merge(spans: Iterable[Span]) -> list[Span]:
    """Sort spans, and merge those that overlap or touch. Empty spans are dropped."""
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
