"""PostgreSQL's lexical rules, as far as statements about subscriptions can use them.

Words fold to lower case (ASCII letters only, as in a UTF-8 database) and are cut to 63 bytes; strings are standard
conforming. Source: src/backend/parser/scan.l.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto

from subscriber.errors import StatementError
from subscriber.redaction import RedactedStatement
from subscriber.sqlstate import CHARACTER_NOT_IN_REPERTOIRE

NAMEDATALEN = 64  # bytes with the terminator


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Words that cannot be a name without quotes: parser/kwlist.h of PostgreSQL 18.
RESERVED = words(
    "all analyse analyze and any array as asc asymmetric both case cast check collate column constraint create"
    " current_catalog current_date current_role current_time current_timestamp current_user default deferrable desc"
    " distinct do else end except false fetch for foreign from grant group having in initially intersect into lateral"
    " leading limit localtime localtimestamp not null offset on only or order placing primary references returning"
    " select session_user some symmetric system_user table then to trailing true union unique user using variadic"
    " when where window with"
)
TYPE_OR_FUNCTION = words(
    "authorization binary collation concurrently cross current_schema freeze full ilike inner is isnull join left"
    " like natural notnull outer overlaps right similar tablesample verbose"
)


class TokenKind(Enum):
    """The kind of a token. Its `text` is its meaning, and its `source` is its spelling."""

    WORD = auto()  # folded
    IDENTIFIER = auto()  # in double quotes
    STRING = auto()
    INTEGER = auto()
    FLOAT = auto()  # also an integer beyond 32 bits
    SYMBOL = auto()
    VALUE = auto()  # of a parameter: a name, a string, or the value of an option
    END = auto()


@dataclass(frozen=True, slots=True)
class Token:
    """`position` counts characters from 0. `source` is for errors, so it shows no password."""

    kind: TokenKind
    text: str = field(repr=False)
    source: str
    position: int


class StatementSyntaxError(StatementError):
    """A statement that PostgreSQL could not parse; `position` is the character, from 0, or None."""

    def __init__(self, message: str, position: int | None, **parts: str | None) -> None:
        super().__init__(message, **parts)
        self.position = position


def syntax_error(token: Token) -> StatementSyntaxError:
    """Return PostgreSQL's error for a token in the wrong place."""
    if token.kind is TokenKind.END:
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
    if token.kind is TokenKind.WORD:
        return token.text not in RESERVED and token.text not in TYPE_OR_FUNCTION
    return token.kind is TokenKind.IDENTIFIER


_BLANK = re.compile(r"(?:[ \t\n\r\f\v]|--[^\n\r]*)+")
# The characters of words, as all but some of ASCII: re takes 5 ms to compile a range up to \U0010FFFF.
_FIRST = r"[^\x00-@\[-^`{-\x7f]"
_NEXT = r"[^\x00-#%-/:-@\[-^`{-\x7f]"
_NEXT_OF_TAG = r"[^\x00-/:-@\[-^`{-\x7f]"
_WORD = re.compile(f"{_FIRST}{_NEXT}*")
_RADIX = re.compile(r"0(?:[xX](?:_?[0-9A-Fa-f])+|[oO](?:_?[0-7])+|[bB](?:_?[01])+)")
_NO_DIGITS = re.compile(r"0(?P<radix>[xXoObB])_?(?!" + _NEXT + ")")
_RADIX_NAMES = {"x": "hexadecimal", "o": "octal", "b": "binary"}
_DIGITS = r"\d+(?:_\d+)*"
_NUMBER = re.compile(rf"(?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS})(?:[eE][+-]?{_DIGITS})?")
_PARAMETER = re.compile(r"\$\d+")
_JUNK = _WORD
_QUOTED = re.compile(r'"((?:[^"]|"")*)"')
_UNICODE = re.compile(r"[uU]&['\"]")
_NO_ESCAPE = "0123456789abcdefABCDEF+'\" \t\n\r\f\v"  # what cannot stand for the backslash of a Unicode escape
_DOLLAR_QUOTE = re.compile(rf"\$(?:{_FIRST}{_NEXT_OF_TAG}*)?\$")
_OPERATOR = re.compile(r"[~!@#^&|`?+\-*/%<>=]+|[,()\[\].;:]")
# A string literal continues in the next one only if a line ends between the two.
_CONTINUES = re.compile(r"(?:[ \t\f\v]|--[^\n\r]*)*[\n\r](?:[ \t\n\r\f\v]|--[^\n\r]*)*'")
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|x([0-9A-Fa-f]{1,2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def tokenize(sql: str) -> Iterator[Token]:
    """Yield the tokens, an END last.

    Raises StatementSyntaxError with PostgreSQL's message: when the invalid token is read (42601), or immediately for
    a text that is not UTF-8 (22021).
    """
    _utf8(sql)
    return _tokens(_Scanner(sql))


def _tokens(scanner: _Scanner) -> Iterator[Token]:
    while True:
        token = scanner.next()
        yield token
        if token.kind is TokenKind.END:
            return


def _utf8(text: str) -> str:
    """Decode the bytes that are surrogates in `text`.

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
    raise StatementSyntaxError(
        f'invalid byte sequence for encoding "UTF8": {shown}', None, sqlstate=CHARACTER_NOT_IN_REPERTOIRE
    )


class _Scanner:
    def __init__(self, sql: str) -> None:
        self._sql = sql
        self._shown = RedactedStatement(sql).piece
        self._at = 0

    def next(self) -> Token:
        self._skip_blanks()
        sql, at = self._sql, self._at
        if at == len(sql):
            return Token(TokenKind.END, "", "", at)
        lead = sql[at]
        if lead == "'":
            return self._token(TokenKind.STRING, self._string(at, escapes=False))
        if lead == '"':
            return self._identifier(at)
        following = sql[at + 1 : at + 2]
        if lead in "eE" and following == "'":
            return self._token(TokenKind.STRING, self._string(at + 1, escapes=True))
        if lead in "nN" and following == "'":  # the name of a type, and a string behind it
            self._at = at + 1
            return Token(TokenKind.WORD, "nchar", lead, at)
        if lead in "bBxX" and following == "'":
            raise syntax_error(self._token(TokenKind.SYMBOL, self._string(at + 1, escapes=False)))  # a bit string
        if _UNICODE.match(sql, at):
            return self._unicode(at)
        if match := _DOLLAR_QUOTE.match(sql, at):
            return self._dollar_quoted(match[0])
        return self._plain(at)

    def _unicode(self, at: int) -> Token:
        """A string or an identifier with Unicode escapes, and the UESCAPE that may follow."""
        if self._sql[at + 2] == "'":
            kind, (text, self._at) = TokenKind.STRING, self._string(at + 2, escapes=False)
        else:
            kind, (text, self._at) = TokenKind.IDENTIFIER, self._quoted(at, at + 2)
        escape = self._escape_character() if self._accept_uescape() else "\\"
        text = self._unescape_unicode(text, escape, at)
        if kind is TokenKind.IDENTIFIER:
            text = truncate_identifier(text)
        return Token(kind, text, self._shown(at, self._at), at)

    def _accept_uescape(self) -> bool:
        """Skip UESCAPE if it is the next token. An error of any other next token is raised when that one is read."""
        end = self._at
        with suppress(StatementSyntaxError):
            self._skip_blanks()
            word = _WORD.match(self._sql, self._at)
            if word is not None and fold(word[0]) == "uescape":
                self._at = word.end()
                return True
        self._at = end
        return False

    def _escape_character(self) -> str:
        self._skip_blanks()
        at = self._at
        if _UNICODE.match(self._sql, at):  # not read as a token, which could be followed by a UESCAPE of its own
            end = self._string(at + 2, escapes=False)[1] if self._sql[at + 2] == "'" else self._quoted(at, at + 2)[1]
            character = Token(TokenKind.SYMBOL, "", self._shown(at, end), at)
        else:
            character = self.next()
        if character.kind is not TokenKind.STRING:
            where = f'at or near "{character.source}"' if character.source else "at end of input"
            raise StatementSyntaxError(f"UESCAPE must be followed by a simple string literal {where}", at)
        if len(character.text) != 1 or character.text in _NO_ESCAPE:
            raise StatementSyntaxError(f'invalid Unicode escape character at or near "{character.source}"', at)
        return character.text

    def _unescape_unicode(self, text: str, escape: str, at: int) -> str:
        """Escapes of four digits, and of a plus sign and six; of a surrogate pair both halves."""
        mark = re.escape(escape)
        pattern = rf"{mark}{mark}|{mark}([0-9A-Fa-f]{{4}})|{mark}\+([0-9A-Fa-f]{{6}})|({mark})|."
        parts: list[str] = []
        first = ""  # half of a pair
        for match in re.finditer(pattern, text, re.DOTALL):
            short, long, wrong = match.groups()
            place = at + 3 + match.start()  # a doubled quote before it counts once, as in PostgreSQL
            if wrong:
                hint = "Unicode escapes must be \\XXXX or \\+XXXXXX."
                raise StatementSyntaxError("invalid Unicode escape", place, hint=hint)
            code = int(short or long, 16) if short or long else -1
            if code == 0 or code > 0x10FFFF:
                raise StatementSyntaxError("invalid Unicode escape value", place)
            if bool(first) != (0xDC00 <= code < 0xE000):
                raise StatementSyntaxError("invalid Unicode surrogate pair", place)
            if 0xD800 <= code < 0xDC00:
                first = chr(code)
            elif code >= 0:
                parts.append((first + chr(code)).encode("utf-16", "surrogatepass").decode("utf-16"))
                first = ""
            else:
                parts.append(escape if len(match[0]) == 2 else match[0])
        if first:
            raise StatementSyntaxError("invalid Unicode surrogate pair", at + 3 + len(text))
        return "".join(parts)

    def _plain(self, at: int) -> Token:
        """A word, a number or a symbol."""
        if match := _WORD.match(self._sql, at):
            self._at = match.end()
            return Token(TokenKind.WORD, truncate_identifier(fold(match[0])), self._shown(at, self._at), at)
        if match := _PARAMETER.match(self._sql, at):
            self._at = match.end()
            self._refuse_junk("parameter", at)
            return Token(TokenKind.SYMBOL, match[0], match[0], at)
        if self._sql[at] in "0123456789." and (number := self._number(at)):
            return number
        match = _OPERATOR.match(self._sql, at)
        source = match[0] if match else self._sql[at]
        # Neither a comment nor a sign may end up inside an operator: "=-1" is two tokens, "=" and "-1".
        if len(source) > 1 and source[0] == "=" and source[1] in "+-/":
            source = "="
        self._at = at + len(source)
        return Token(TokenKind.SYMBOL, source, self._shown(at, self._at), at)

    def _number(self, at: int) -> Token | None:
        match = _RADIX.match(self._sql, at)
        if match is None and (wrong := _NO_DIGITS.match(self._sql, at)):
            radix = _RADIX_NAMES[wrong["radix"].lower()]
            source = self._shown(at, wrong.end())
            raise StatementSyntaxError(f'invalid {radix} integer at or near "{source}"', at)
        match = match or _NUMBER.match(self._sql, at)
        if match is None:
            return None
        self._at = match.end()
        self._refuse_junk("numeric literal", at)
        text = match[0].replace("_", "")
        try:
            number = int(text) if text.isdecimal() else int(text, 0)
        except ValueError:
            number = 1 << 31
        if number < 1 << 31:
            return Token(TokenKind.INTEGER, str(number), self._shown(at, self._at), at)
        return Token(TokenKind.FLOAT, match[0], self._shown(at, self._at), at)

    def _refuse_junk(self, what: str, at: int) -> None:
        if junk := _JUNK.match(self._sql, self._at):
            source = self._shown(at, junk.end())
            raise StatementSyntaxError(f'trailing junk after {what} at or near "{source}"', at)

    def _token(self, kind: TokenKind, text_and_end: tuple[str, int]) -> Token:
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
        text, self._at = self._quoted(at, at)
        return Token(TokenKind.IDENTIFIER, truncate_identifier(text), self._shown(at, self._at), at)

    def _quoted(self, at: int, opening: int) -> tuple[str, int]:
        """The identifier whose first quote is at `opening`, and the position after it; the token begins at `at`."""
        match = _QUOTED.match(self._sql, opening)
        if match is None:
            raise self._unterminated("quoted identifier", at)
        if not match[1]:
            source = self._sql[at : match.end()]
            raise StatementSyntaxError(f'zero-length delimited identifier at or near "{source}"', at)
        return match[1].replace('""', '"'), match.end()

    def _dollar_quoted(self, tag: str) -> Token:
        start = self._at
        end = self._sql.find(tag, start + len(tag))
        if end < 0:
            raise self._unterminated("dollar-quoted string", start)
        self._at = end + len(tag)
        return Token(TokenKind.STRING, self._sql[start + len(tag) : end], self._shown(start, self._at), start)
