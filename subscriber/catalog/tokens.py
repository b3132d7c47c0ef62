"""PostgreSQL's lexical rules, as far as statements about subscriptions can use them.

Words fold to lower case (ASCII letters only, as in a UTF-8 database) and are cut to 63 bytes; strings are standard
conforming. Source: src/backend/parser/scan.l.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum, auto

from subscriber.errors import StatementError
from subscriber.redaction import RedactedStatement

NAMEDATALEN = 64  # bytes with the terminator


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Words that cannot be a name without quotes: parser/kwlist.h of PostgreSQL 18.
RESERVED = _words(
    "all analyse analyze and any array as asc asymmetric both case cast check collate column constraint create"
    " current_catalog current_date current_role current_time current_timestamp current_user default deferrable desc"
    " distinct do else end except false fetch for foreign from grant group having in initially intersect into lateral"
    " leading limit localtime localtimestamp not null offset on only or order placing primary references returning"
    " select session_user some symmetric system_user table then to trailing true union unique user using variadic"
    " when where window with"
)
TYPE_OR_FUNCTION = _words(
    "authorization binary collation concurrently cross current_schema freeze full ilike inner is isnull join left"
    " like natural notnull outer overlaps right similar tablesample verbose"
)


class Kind(Enum):
    """What a token is; `text` of a token holds its meaning, and `source` how it was written."""

    WORD = auto()  # folded
    IDENTIFIER = auto()  # in double quotes
    STRING = auto()
    INTEGER = auto()
    FLOAT = auto()  # also an integer beyond 32 bits
    SYMBOL = auto()
    END = auto()


@dataclass(frozen=True, slots=True)
class Token:
    """`position` counts characters from 0. `source` is for errors, so it shows no password."""

    kind: Kind
    text: str = field(repr=False)
    source: str
    position: int


class StatementSyntaxError(StatementError):
    """A statement that PostgreSQL could not parse; `position` is the character, from 0, or None."""

    def __init__(self, message: str, position: int | None, **parts: str | None) -> None:
        super().__init__(message, **parts)
        self.position = position


def syntax_error(token: Token) -> StatementSyntaxError:
    """What PostgreSQL says of a token that cannot stand where it does."""
    if token.kind is Kind.END:
        return StatementSyntaxError("syntax error at end of input", token.position)
    return StatementSyntaxError(f'syntax error at or near "{token.source}"', token.position)


def truncate_identifier(name: str) -> str:
    """At most 63 bytes, and no character cut in two."""
    return name.encode()[: NAMEDATALEN - 1].decode("utf-8", "ignore")


def fold(word: str) -> str:
    """Lower case for ASCII letters, nothing for others."""
    return "".join(chr(ord(c) + 32) if "A" <= c <= "Z" else c for c in word)


def is_name(token: Token) -> bool:
    """Can it be a subscription's or publication's name (ColId)?"""
    if token.kind is Kind.WORD:
        return token.text not in RESERVED and token.text not in TYPE_OR_FUNCTION
    return token.kind is Kind.IDENTIFIER


_BLANK = re.compile(r"(?:[ \t\n\r\f\v]|--[^\n\r]*)+")
_WORD = re.compile(r"[A-Za-z_\x80-\U0010FFFF][A-Za-z0-9_$\x80-\U0010FFFF]*")
_NUMBER = re.compile(r"(?:\d+(?:_\d+)*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
_JUNK = re.compile(r"[A-Za-z_\x80-\U0010FFFF]+")
_DOLLAR_QUOTE = re.compile(r"\$(?:[A-Za-z_\x80-\U0010FFFF][A-Za-z0-9_\x80-\U0010FFFF]*)?\$")
_OPERATOR = re.compile(r"[~!@#^&|`?+\-*/%<>=]+|[,()\[\].;:]")
# A string literal goes on in the next one only if a line ends between them.
_CONTINUES = re.compile(r"(?:[ \t\f\v]|--[^\n\r]*)*[\n\r](?:[ \t\n\r\f\v]|--[^\n\r]*)*'")
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|x([0-9A-Fa-f]{1,2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def tokenize(sql: str) -> list[Token]:
    """All tokens, an END last. Raises StatementSyntaxError with PostgreSQL's message (42601; 22021 if not UTF-8)."""
    _utf8(sql)
    scanner = _Scanner(sql)
    tokens: list[Token] = []
    while not tokens or tokens[-1].kind is not Kind.END:
        tokens.append(scanner.next())
    return tokens


def _utf8(text: str) -> str:
    """The text with bytes that came one by one (as surrogates) made characters again.

    Raises StatementSyntaxError (22021), naming the bytes as report_invalid_encoding() in mbutils.c does.
    """
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half of a surrogate pair, which is no byte either
        data = text.encode("utf-8", "surrogatepass")
    try:
        text, wrong = data.decode("utf-8"), data.find(b"\0")
    except UnicodeDecodeError as error:
        wrong = error.start
    if wrong < 0:
        return text
    lead = data[wrong]
    length = 1 if lead < 0xC0 or lead >= 0xF8 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
    shown = " ".join(f"0x{byte:02x}" for byte in data[wrong : wrong + length])
    raise StatementSyntaxError(f'invalid byte sequence for encoding "UTF8": {shown}', None, sqlstate="22021")


class _Scanner:
    def __init__(self, sql: str) -> None:
        self._sql = sql
        self._shown = RedactedStatement(sql).piece
        self._at = 0

    def next(self) -> Token:
        self._skip_blanks()
        sql, at = self._sql, self._at
        if at == len(sql):
            return Token(Kind.END, "", "", at)
        lead = sql[at]
        if lead == "'":
            return self._token(Kind.STRING, self._string(at, escapes=False))
        if lead == '"':
            return self._identifier(at)
        following = sql[at + 1 : at + 2]
        if lead in "eE" and following == "'":
            return self._token(Kind.STRING, self._string(at + 1, escapes=True))
        if lead in "nN" and following == "'":
            return self._token(Kind.STRING, self._string(at + 1, escapes=False))
        if lead in "bBxX" and following == "'":
            raise syntax_error(self._token(Kind.SYMBOL, self._string(at + 1, escapes=False)))  # a bit string
        if lead in "uU" and following == "&" and sql[at + 2 : at + 3] in ("'", '"'):
            raise StatementSyntaxError(
                "strings and identifiers with Unicode escapes (U&) are not supported",
                at,
                hint="Write the characters themselves, or use an escape string constant (E'\\u00e4').",
                sqlstate="0A000",
            )
        if match := _DOLLAR_QUOTE.match(sql, at):
            return self._dollar_quoted(match[0])
        return self._plain(at)

    def _plain(self, at: int) -> Token:
        """A word, a number or a symbol."""
        if match := _WORD.match(self._sql, at):
            self._at = match.end()
            return Token(Kind.WORD, truncate_identifier(fold(match[0])), self._shown(at, self._at), at)
        if match := _NUMBER.match(self._sql, at):
            self._at = match.end()
            if junk := _JUNK.match(self._sql, self._at):
                source = self._shown(at, junk.end())
                raise StatementSyntaxError(f'trailing junk after numeric literal at or near "{source}"', at)
            text = match[0].replace("_", "")
            whole = text.isdecimal() and int(text) < 1 << 31
            return Token(Kind.INTEGER if whole else Kind.FLOAT, text, self._shown(at, self._at), at)
        match = _OPERATOR.match(self._sql, at)
        source = match[0] if match else self._sql[at]
        # Neither a comment nor a sign may end up inside an operator: "=-1" is two tokens, "=" and "-1".
        if len(source) > 1 and source[0] == "=" and source[1] in "+-/":
            source = "="
        self._at = at + len(source)
        return Token(Kind.SYMBOL, source, self._shown(at, self._at), at)

    def _token(self, kind: Kind, text_and_end: tuple[str, int]) -> Token:
        at = self._at
        text, self._at = text_and_end
        return Token(kind, text, self._shown(at, self._at), at)

    def _skip_blanks(self) -> None:
        while True:
            if match := _BLANK.match(self._sql, self._at):
                self._at = match.end()
            if not self._sql.startswith("/*", self._at):
                return
            depth, start = 0, self._at
            for match in re.compile(r"/\*|\*/").finditer(self._sql, start):
                depth += 1 if match[0] == "/*" else -1
                self._at = match.end()
                if depth == 0:
                    break
            else:
                raise self._unterminated("/* comment", start)

    def _unterminated(self, what: str, start: int) -> StatementSyntaxError:
        return StatementSyntaxError(f'unterminated {what} at or near "{self._shown(start, len(self._sql))}"', start)

    def _string(self, opening: int, *, escapes: bool) -> tuple[str, int]:
        """The string whose first quote is at `opening`, and the position after its last part."""
        pattern = re.compile(r"'((?:[^'\\]|\\.|'')*)'" if escapes else r"'((?:[^']|'')*)'", re.DOTALL)
        parts: list[str] = []
        at = opening
        while True:
            match = pattern.match(self._sql, at)
            if match is None:
                raise self._unterminated("quoted string", self._at)
            parts.append(match[1].replace("''", "'") if not escapes else self._unescape(match[1]))
            further = _CONTINUES.match(self._sql, match.end())
            if further is None:
                return "".join(parts), match.end()
            at = further.end() - 1

    def _unescape(self, body: str) -> str:
        """Escapes of E''. Bytes beyond ASCII are read as UTF-8, which an escape by itself may not be."""

        def one(match: re.Match[str]) -> str:
            octal, hexadecimal, short, long, other = match.groups()
            if octal or hexadecimal:
                value = int(octal, 8) & 0xFF if octal else int(hexadecimal, 16)
                return bytes([value]).decode("utf-8", "surrogateescape")
            if short or long:
                code = int(short or long, 16)
                if code == 0 or code > 0x10FFFF or 0xD800 <= code < 0xE000:
                    raise StatementSyntaxError("invalid Unicode escape value", self._at)
                return chr(code)
            return _ESCAPED.get(other, other)

        pieces = re.split(r"('')", body)
        text = "".join("'" if piece == "''" else _ESCAPE.sub(one, piece) for piece in pieces)
        return _utf8(text)

    def _identifier(self, at: int) -> Token:
        match = re.compile(r'"((?:[^"]|"")*)"').match(self._sql, at)
        if match is None:
            raise self._unterminated("quoted identifier", at)
        if not match[1]:
            raise StatementSyntaxError('zero-length delimited identifier at or near """"', at)
        self._at = match.end()
        return Token(Kind.IDENTIFIER, truncate_identifier(match[1].replace('""', '"')), self._shown(at, self._at), at)

    def _dollar_quoted(self, tag: str) -> Token:
        start = self._at
        end = self._sql.find(tag, start + len(tag))
        if end < 0:
            raise self._unterminated("dollar-quoted string", start)
        self._at = end + len(tag)
        return Token(Kind.STRING, self._sql[start + len(tag) : end], self._shown(start, self._at), start)
