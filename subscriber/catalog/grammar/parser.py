"""The grammar of statements about subscriptions, as PostgreSQL 19 spells it.

QUARANTINE and REFRESH TABLE are this package's own.

    CREATE SUBSCRIPTION name CONNECTION 'conninfo' | SERVER name PUBLICATION name, … [WITH (option [= value], …)]
    ALTER SUBSCRIPTION name CONNECTION 'conninfo' | SERVER name
    ALTER SUBSCRIPTION name SET | ADD | DROP PUBLICATION name, … [WITH (…)]
    ALTER SUBSCRIPTION name REFRESH PUBLICATION [WITH (…)]
    ALTER SUBSCRIPTION name REFRESH SEQUENCES
    ALTER SUBSCRIPTION name REFRESH TABLE [schema.]table, … [WITH (truncate [= value])]
    ALTER SUBSCRIPTION name ENABLE | DISABLE
    ALTER SUBSCRIPTION name SET (…) | SKIP (…)
    ALTER SUBSCRIPTION name QUARANTINE RETRY [(lsn = position)]
    ALTER SUBSCRIPTION name QUARANTINE DISCARD (lsn = position) [CASCADE | RESTRICT]
    ALTER SUBSCRIPTION name QUARANTINE EDIT (lsn = position, change = number, column = name, value = text | null)
    ALTER SUBSCRIPTION name QUARANTINE EDIT (lsn = position, change = number, discard)
    ALTER SUBSCRIPTION name OWNER TO role | CURRENT_ROLE | CURRENT_USER | SESSION_USER
    ALTER SUBSCRIPTION name RENAME TO name
    DROP SUBSCRIPTION [IF EXISTS] name [CASCADE | RESTRICT]

Pure: text in, dataclasses out. What an option may be is said in options.py. Source: src/backend/parser/gram.y.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from subscriber.catalog.grammar.lexer import (
    RESERVED,
    StatementSyntaxError,
    Token,
    TokenKind,
    is_name,
    syntax_error,
    tokenize,
    truncate_identifier,
    words,
)
from subscriber.catalog.grammar.role_word import RoleWord
from subscriber.display import near_word
from subscriber.errors import StatementError
from subscriber.quoting import identifier, replication_literal
from subscriber.sqlstate import FEATURE_NOT_SUPPORTED, RESERVED_NAME, UNDEFINED_PARAMETER

NEAR = 0.75  # the likeness of a mistyped word


@dataclass(frozen=True, slots=True)
class Option:
    """One `name [= value]`. The value is an int only if it was written as one, and None if there was none."""

    name: str
    value: str | int | None = None


@dataclass(frozen=True, slots=True)
class CreateSubscription:
    """Either `conninfo` or `server` is None."""

    name: str
    conninfo: str | None = field(repr=False)
    publications: tuple[str, ...]
    options: tuple[Option, ...] = ()
    server: str | None = None


@dataclass(frozen=True, slots=True)
class AlterConnection:
    """Either `conninfo` or `server` is None."""

    name: str
    conninfo: str | None = field(repr=False)
    server: str | None = None


@dataclass(frozen=True, slots=True)
class AlterPublications:
    name: str
    action: Literal["set", "add", "drop"]
    publications: tuple[str, ...]
    options: tuple[Option, ...] = ()


@dataclass(frozen=True, slots=True)
class AlterRefresh:
    name: str
    options: tuple[Option, ...] = ()


@dataclass(frozen=True, slots=True)
class AlterRefreshSequences:
    name: str


@dataclass(frozen=True, slots=True)
class TableName:
    """The name of a table in a statement. `schema` is None if the statement has none."""

    schema: str | None
    name: str

    @property
    def label(self) -> str:
        """The name in messages."""
        return self.name if self.schema is None else f"{self.schema}.{self.name}"


@dataclass(frozen=True, slots=True)
class AlterRefreshTables:
    name: str
    tables: tuple[TableName, ...]
    options: tuple[Option, ...] = ()


@dataclass(frozen=True, slots=True)
class AlterEnabled:
    name: str
    enabled: bool


@dataclass(frozen=True, slots=True)
class AlterOptions:
    name: str
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class AlterSkip:
    name: str
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class AlterQuarantine:
    """A statement on quarantined transactions. quarantine_options.py has the meaning of the options."""

    name: str
    action: Literal["retry", "discard", "edit"]
    options: tuple[Option, ...] = ()
    cascade: bool = False


@dataclass(frozen=True, slots=True)
class AlterOwner:
    name: str
    role: str | RoleWord


@dataclass(frozen=True, slots=True)
class AlterRename:
    name: str
    new_name: str


@dataclass(frozen=True, slots=True)
class DropSubscription:
    name: str
    if_exists: bool = False
    cascade: bool = False  # accepted, and without effect: nothing depends on a subscription


# Words that stand for a type whose name is another one, or that the grammar qualifies: the value of an option is read
# as a type. Source: SimpleTypename in gram.y.
_TYPES = {
    "bigint": "int8",
    "bit": "bit",
    "boolean": "bool",
    "char": "bpchar",
    "character": "bpchar",
    "dec": "numeric",
    "decimal": "numeric",
    "float": "float8",
    "int": "int4",
    "integer": "int4",
    "interval": "interval",
    "json": "json",
    "national": "bpchar",
    "nchar": "bpchar",
    "numeric": "numeric",
    "real": "float4",
    "smallint": "int2",
    "time": "time",
    "timestamp": "timestamp",
    "varchar": "varchar",
}

# Words that the grammar has for functions and expressions, and which name no type: col_name_keyword in gram.y.
_FUNCTIONS = words(
    "between coalesce exists extract greatest grouping inout json_array json_arrayagg json_exists json_object"
    " json_objectagg json_query json_scalar json_serialize json_table json_value least merge_action normalize nullif"
    " out overlay position precision row substring treat trim values xmlattributes xmlconcat xmlelement xmlexists"
    " xmlforest xmlnamespaces xmlparse xmlpi xmlroot xmlserialize xmltable"
)

Statement: TypeAlias = (
    CreateSubscription
    | AlterConnection
    | AlterPublications
    | AlterRefresh
    | AlterRefreshSequences
    | AlterRefreshTables
    | AlterEnabled
    | AlterOptions
    | AlterSkip
    | AlterQuarantine
    | AlterOwner
    | AlterRename
    | DropSubscription
)


def parse(sql: str, parameters: Sequence[str | int | bool] = ()) -> list[Statement]:
    """Parse a text of statements, separated by semicolons. Empty statements are skipped.

    Args:
        sql: the text.
        parameters: the values of $1, $2, …, which stand for names, strings and values of options. An error shows the
            number of a parameter, and not its value.

    Raises StatementSyntaxError with PostgreSQL's message and the position, and StatementError (0A000) for a statement
    about another kind of object than a subscription.
    """
    return _Parser(_with_parameters(tokenize(sql), parameters)).statements()


def _with_parameters(tokens: Iterator[Token], parameters: Sequence[str | int | bool]) -> Iterator[Token]:
    """Replace the number of each parameter by its value."""
    for token in tokens:
        if token.kind is not TokenKind.SYMBOL or not token.text.startswith("$") or not parameters:
            yield token
            continue
        number = int(token.text[1:])
        if not 1 <= number <= len(parameters):
            message = f"there is no parameter {token.source}"
            raise StatementSyntaxError(message, token.position, sqlstate=UNDEFINED_PARAMETER)
        value = parameters[number - 1]
        if isinstance(value, str):
            yield replace(token, kind=TokenKind.VALUE, text=value)
        elif isinstance(value, bool):
            yield replace(token, kind=TokenKind.WORD, text=str(value).lower())
        else:
            yield replace(token, kind=TokenKind.INTEGER, text=str(value))


class _Parser:
    def __init__(self, tokens: Iterator[Token]) -> None:
        """Create a parser. It reads tokens when it needs them, so an earlier syntax error takes precedence."""
        self._tokens = tokens
        self._ahead: list[Token] = []  # tokens that have been read and not consumed

    def _peek(self, further: int = 0) -> Token:
        while len(self._ahead) <= further:
            if self._ahead and self._ahead[-1].kind is TokenKind.END:
                return self._ahead[-1]
            self._ahead.append(next(self._tokens))
        return self._ahead[further]

    def _take(self) -> Token:
        token = self._peek()
        if token.kind is not TokenKind.END:
            self._ahead.pop(0)
        return token

    def _is(self, *words: str) -> bool:
        """Return True if the next token is one of these words or symbols."""
        return self._peek().kind in (TokenKind.WORD, TokenKind.SYMBOL) and self._peek().text in words

    def _accept(self, *words: str) -> str | None:
        return self._take().text if self._is(*words) else None

    def _expect(self, *words: str) -> str:
        if not self._is(*words):
            raise self._unexpected(self._peek(), *words)
        return self._take().text

    def _unexpected(self, token: Token, *words: str) -> StatementSyntaxError:
        """Return the error of a token in place of one of these words, with the word that it may stand for."""
        error = syntax_error(token)
        if token.kind is TokenKind.END:
            error.amend(hint=f"The next word is {' or '.join(word.upper() for word in words)}.")
        elif token.kind is TokenKind.WORD:
            error.amend(hint=near_word(token.text, [word.upper() for word in words if word.isalpha()], cutoff=NEAR))
        return error

    def _name(self) -> str:
        if self._peek().kind is TokenKind.VALUE:
            return truncate_identifier(self._take().text)
        if not is_name(self._peek()):
            raise syntax_error(self._peek())
        return self._take().text

    def _string(self) -> str:
        if self._peek().kind not in (TokenKind.STRING, TokenKind.VALUE):
            raise syntax_error(self._peek())
        return self._take().text

    def _names(self) -> tuple[str, ...]:
        names = [self._name()]
        while self._accept(","):
            names.append(self._name())
        return tuple(names)

    def statements(self) -> list[Statement]:
        statements: list[Statement] = []
        while True:
            while self._accept(";"):
                pass
            if self._peek().kind is TokenKind.END:
                return statements
            statements.append(self._statement())
            if self._peek().kind is not TokenKind.END:
                self._expect(";")

    def _statement(self) -> Statement:
        start = self._take()
        if start.kind is not TokenKind.WORD:
            raise syntax_error(start)
        verbs = ("create", "alter", "drop")
        if start.text not in verbs or not self._accept("subscription"):
            for token, words in ((start, verbs), (self._peek(), ("subscription",))):
                if token.text not in words and (error := self._unexpected(token, *words)).hint:
                    raise error
                if token.text not in words:
                    break
            raise StatementError(
                "only CREATE, ALTER and DROP SUBSCRIPTION can be executed here",
                hint="Use psql for other statements.",
                sqlstate=FEATURE_NOT_SUPPORTED,
            )
        if start.text == "create":
            return self._create()
        return self._alter() if start.text == "alter" else self._drop()

    def _create(self) -> CreateSubscription:
        name = self._name()
        conninfo, server = self._connection(self._expect("connection", "server"))
        self._expect("publication")
        return CreateSubscription(name, conninfo, self._names(), self._with(), server)

    def _connection(self, word: str) -> tuple[str | None, str | None]:
        """Read the connection string, or the name of a foreign server."""
        return (self._string(), None) if word == "connection" else (None, self._name())

    def _drop(self) -> DropSubscription:
        # IF is no reserved word: a subscription may be called so, unless EXISTS follows.
        if_exists = self._is("if") and self._peek(1).kind is TokenKind.WORD and self._peek(1).text == "exists"
        if if_exists:
            self._take()
            self._take()
        return DropSubscription(self._name(), if_exists, self._accept("cascade", "restrict") == "cascade")

    def _alter(self) -> Statement:
        name = self._name()
        match self._expect(
            "connection",
            "server",
            "set",
            "add",
            "drop",
            "refresh",
            "enable",
            "disable",
            "skip",
            "quarantine",
            "owner",
            "rename",
        ):
            case "connection" | "server" as word:
                return AlterConnection(name, *self._connection(word))
            case "set":
                if self._is("("):
                    return AlterOptions(name, self._options())
                return self._publications(name, "set")
            case "add":
                return self._publications(name, "add")
            case "drop":
                return self._publications(name, "drop")
            case "refresh":
                return self._refresh(name)
            case "skip":
                return AlterSkip(name, self._options())
            case "quarantine":
                return self._quarantine(name)
            case "owner":
                self._expect("to")
                return AlterOwner(name, self._role())
            case "rename":
                self._expect("to")
                return AlterRename(name, self._name())
            case word:
                return AlterEnabled(name, word == "enable")

    def _refresh(self, name: str) -> Statement:
        match self._expect("publication", "sequences", "table"):
            case "sequences":
                return AlterRefreshSequences(name)
            case "table":
                tables = [self._table()]
                while self._accept(","):
                    tables.append(self._table())
                return AlterRefreshTables(name, tuple(tables), self._with())
        return AlterRefresh(name, self._with())

    def _table(self) -> TableName:
        name = self._name()
        return TableName(name, self._name()) if self._accept(".") else TableName(None, name)

    def _quarantine(self, name: str) -> AlterQuarantine:
        match self._expect("retry", "discard", "edit"):
            case "retry":
                return AlterQuarantine(name, "retry", self._options() if self._is("(") else ())
            case "discard":
                options = self._options()
                return AlterQuarantine(name, "discard", options, self._accept("cascade", "restrict") == "cascade")
        return AlterQuarantine(name, "edit", self._options())

    def _publications(self, name: str, action: Literal["set", "add", "drop"]) -> AlterPublications:
        self._expect("publication")
        return AlterPublications(name, action, self._names(), self._with())

    def _role(self) -> str | RoleWord:
        token = self._take()
        if token.kind is TokenKind.WORD:
            if token.text in list(RoleWord):
                return RoleWord(token.text)
            if token.text in RESERVED:
                raise syntax_error(token)
        elif token.kind not in (TokenKind.IDENTIFIER, TokenKind.VALUE):
            raise syntax_error(token)
        if token.text == "none":
            raise StatementSyntaxError('role name "none" is reserved', token.position, sqlstate=RESERVED_NAME)
        return token.text

    def _with(self) -> tuple[Option, ...]:
        return self._options() if self._accept("with") else ()

    def _options(self) -> tuple[Option, ...]:
        self._expect("(")
        options = [self._option()]
        while self._expect(",", ")") == ",":
            options.append(self._option())
        return tuple(options)

    def _option(self) -> Option:
        token = self._take()
        if token.kind not in (TokenKind.WORD, TokenKind.IDENTIFIER):  # any word at all, reserved ones too
            raise syntax_error(token)
        if not self._accept("="):
            return Option(token.text)
        is_rule = token.text == "source_tag" and self._is("(")
        return Option(token.text, self._in_parentheses() if is_rule else self._value())

    def _in_parentheses(self) -> str:
        """Read the tokens of a rule up to the closing parenthesis, and return them as text."""
        texts: list[str] = []
        depth = 0
        while not texts or depth:
            token = self._take()
            if token.kind is TokenKind.END:
                raise syntax_error(token)
            depth += {"(": 1, ")": -1}.get(token.text, 0) if token.kind is TokenKind.SYMBOL else 0
            if token.kind in (TokenKind.STRING, TokenKind.VALUE):
                texts.append(replication_literal(token.text))
            else:
                texts.append(identifier(token.text) if token.kind is TokenKind.IDENTIFIER else token.text)
        return " ".join(texts)

    def _value(self) -> str | int:
        token = self._take()
        sign = ""
        if token.kind is TokenKind.SYMBOL and token.text in ("+", "-"):
            sign, token = token.text.strip("+"), self._take()
            if token.kind not in (TokenKind.INTEGER, TokenKind.FLOAT):
                raise syntax_error(token)
        match token.kind:
            case TokenKind.INTEGER:
                return int(sign + token.text)
            case TokenKind.FLOAT:
                return sign + token.text
            case TokenKind.STRING | TokenKind.VALUE:
                return token.text
            case TokenKind.WORD | TokenKind.IDENTIFIER:
                # PostgreSQL reads a type's name here, so it may be qualified.
                if token.kind is TokenKind.WORD and token.text in _TYPES:
                    return f"pg_catalog.{_TYPES[token.text]}"
                if token.kind is TokenKind.WORD and token.text in _FUNCTIONS:
                    raise syntax_error(token)
                text = token.text
                while self._accept("."):
                    text += f".{self._name()}"
                return text
            case _:
                raise syntax_error(token)
