"""Rules of ownership: parse the option source_tag, and find the rule for a table.

    tenant_id = 7
    public.orders: tenant_id = 7, public.lines: order_id BETWEEN 7000000 AND 7999999, public.countries: all

An entry names a table of the target, or none: then it is for all other tables. The rule of a table selects the rows
that belong to the subscription. It is `all`, or conditions that are connected by AND. A condition compares a column
with constants: =, <, <=, >, >=, IN (…), BETWEEN … AND …. A constant is a number, a string, true or false.

**Invariants.**

- The text of the option never becomes a part of a statement. condition() writes SQL from the parsed rule, with the
  operators of pg_catalog, and only for columns of built-in types. So no function, operator or cast of a user runs.
- Both servers select the same rows: texts are compared in collation C. The constant of a text's range is ASCII,
  because the order of other characters depends on the server's encoding.
- Two rules are disjoint if a column that both name has no value in common. Otherwise some row may belong to both.
- A row belongs to no rule if one of the columns is NULL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from enum import Enum
from uuid import UUID

from subscriber.errors import StatementError
from subscriber.quoting import identifier, literal
from subscriber.sqlstate import INVALID_PARAMETER_VALUE

Table = tuple[str, str]  # schema and name, on the target
Constant = Decimal | str | bool

_OPTION = "source_tag"
_C = 'COLLATE pg_catalog."C"'
_MODIFIER = re.compile(r"\(.*\)")


class ColumnKind(Enum):
    """The built-in types of a rule's columns. The value is the type of the constants in SQL."""

    INTEGER = "pg_catalog.int8"
    NUMERIC = "pg_catalog.numeric"
    TEXT = "pg_catalog.text"
    UUID = "pg_catalog.uuid"
    DATE = "pg_catalog.date"
    BOOLEAN = "pg_catalog.bool"

    @classmethod
    def of(cls, type_name: str) -> ColumnKind | None:
        """Return the kind of a type as format_type() prints it; the base type of a domain. None: it has none."""
        return _KINDS.get(_MODIFIER.sub("", type_name))

    def spelled(self, constant: Constant) -> str | None:
        """Return the text of a constant for a column of this kind. None: the column has no such value."""
        match self, constant:
            case ColumnKind.BOOLEAN, bool():
                return str(constant).lower()
            case ColumnKind.NUMERIC, Decimal():
                return str(constant)
            case ColumnKind.INTEGER, Decimal() if constant == int(constant) and abs(constant) < 2**63:
                return str(int(constant))
            case ColumnKind.TEXT, str():
                return constant
            case ColumnKind.UUID, str():
                return constant if _is_canonical(UUID, constant) else None
            case ColumnKind.DATE, str():
                return constant if _is_canonical(date.fromisoformat, constant) else None
        return None


_KINDS = {
    **dict.fromkeys(("smallint", "integer", "bigint"), ColumnKind.INTEGER),
    "numeric": ColumnKind.NUMERIC,
    **dict.fromkeys(("text", "character varying"), ColumnKind.TEXT),
    "uuid": ColumnKind.UUID,
    "date": ColumnKind.DATE,
    "boolean": ColumnKind.BOOLEAN,
}


def _is_canonical(read: Callable[[str], object], text: str) -> bool:
    """Return True if a value has only this text, so that texts have the order of the values."""
    try:
        return str(read(text)) == text
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Bound:
    """One end of a range. `included`: the constant belongs to the range."""

    constant: Constant
    included: bool


@dataclass(frozen=True, slots=True)
class Values:
    """The values that a column of the rule's rows may have.

    `listed` are single values; None: all between the bounds. A missing bound is None.
    """

    listed: tuple[Constant, ...] | None = None
    low: Bound | None = None
    high: Bound | None = None

    def constants(self) -> tuple[Constant, ...]:
        bounds = (bound.constant for bound in (self.low, self.high) if bound is not None)
        return (*bounds,) if self.listed is None else self.listed

    @property
    def kinds(self) -> set[type]:
        return {type(constant) for constant in self.constants()}

    def contains(self, constant: Constant) -> bool:
        if self.listed is not None:
            return constant in self.listed
        place = _sorting(constant)
        if self.low is not None:
            low = _sorting(self.low.constant)
            if place < low or (place == low and not self.low.included):
                return False
        if self.high is not None:
            high = _sorting(self.high.constant)
            return place < high or (place == high and self.high.included)
        return True

    def common(self, other: Values) -> Values:
        """Return the values that both have."""
        if self.listed is not None:
            return Values(tuple(constant for constant in self.listed if other.contains(constant)))
        if other.listed is not None:
            return other.common(self)
        lows = [bound for bound in (self.low, other.low) if bound is not None]
        highs = [bound for bound in (self.high, other.high) if bound is not None]
        return Values(
            None,
            max(lows, key=lambda bound: (_sorting(bound.constant), not bound.included), default=None),
            min(highs, key=lambda bound: (_sorting(bound.constant), bound.included), default=None),
        )

    @property
    def is_empty(self) -> bool:
        if self.listed is not None:
            return not self.listed
        if self.low is None or self.high is None:
            return False
        low, high = _sorting(self.low.constant), _sorting(self.high.constant)
        return low > high or (low == high and not (self.low.included and self.high.included))

    def condition(self, column: str, kind: ColumnKind) -> str:
        """Return SQL that is true for these values. `column`: the name, quoted."""
        value = f"{column} {_C}" if kind is ColumnKind.TEXT else column

        def compare(operator: str, constant: Constant) -> str:
            spelled = literal(kind.spelled(constant) or "")
            return f"{value} OPERATOR(pg_catalog.{operator}) {spelled}::{kind.value}"

        if self.listed is not None:
            return f"({' OR '.join(compare('=', constant) for constant in self.listed)})"
        parts = []
        if self.low is not None:
            parts.append(compare(">=" if self.low.included else ">", self.low.constant))
        if self.high is not None:
            parts.append(compare("<=" if self.high.included else "<", self.high.constant))
        return " AND ".join(parts)


def _sorting(constant: Constant) -> tuple[Decimal, bytes]:
    return (Decimal(0), constant.encode()) if isinstance(constant, str) else (Decimal(constant), b"")


@dataclass(frozen=True, slots=True)
class OwnershipRule:
    """The rows of a table that belong to a subscription, by column. No column: all rows."""

    columns: Mapping[str, Values] = field(default_factory=dict)

    @property
    def has_all_rows(self) -> bool:
        return not self.columns

    def is_disjoint(self, other: OwnershipRule) -> bool:
        """Return True if no row can belong to both rules."""
        both = ((values, other.columns[name]) for name, values in self.columns.items() if name in other.columns)
        return any(cell.kinds == more.kinds and cell.common(more).is_empty for cell, more in both)

    def problem(self, types: Mapping[str, str]) -> str | None:
        """Return the reason why the rule does not fit a table. None: it fits.

        Args:
            types: the type of each column, as format_type() prints it; the base type of a domain.
        """
        for name, values in self.columns.items():
            if name not in types:
                return f'column "{name}" does not exist, or is not published'
            kind = ColumnKind.of(types[name])
            if kind is None:
                return f'column "{name}" has type {types[name]}, which rules of ownership do not support'
            if any(kind.spelled(constant) is None for constant in values.constants()):
                return f'column "{name}" has type {types[name]}, and the rule compares it with another kind of constant'
            is_range = values.listed is None
            if is_range and kind is ColumnKind.BOOLEAN:
                return f'column "{name}" is boolean, and has no ranges'
            if is_range and not all(str(constant).isascii() for constant in values.constants()):
                return f'the range of column "{name}" has a constant that is not ASCII'
        return None

    def condition(self, types: Mapping[str, str]) -> str:
        """Return SQL that is true for the rows of the rule. `types`: see problem().

        Raises:
            StatementError: the rule does not fit the table.
        """
        if (problem := self.problem(types)) is not None:
            raise StatementError(f"rule of ownership does not fit: {problem}", sqlstate=INVALID_PARAMETER_VALUE)
        parts = []
        for name, values in self.columns.items():
            kind = ColumnKind.of(types[name])
            assert kind is not None
            parts.append(values.condition(identifier(name), kind))
        return " AND ".join(parts) or "true"


ALL_ROWS = OwnershipRule()


@dataclass(frozen=True, slots=True)
class OwnershipRules:
    """The rules of a subscription. Falsy when it has none.

    Attributes:
        tables: the rules of single tables.
        default: the rule of the other tables. None: they have none.
    """

    tables: Mapping[Table, OwnershipRule] = field(default_factory=dict)
    default: OwnershipRule | None = None

    def __bool__(self) -> bool:
        return bool(self.tables) or self.default is not None

    def rule(self, table: Table) -> OwnershipRule | None:
        """Return the rule of a table. None: nothing says which rows belong to the subscription."""
        return self.tables.get(table, self.default)


@dataclass(frozen=True, slots=True)
class TableWriter:
    """Another subscription with rows in a table. `rule`: its rows; None: nothing says which ones these are."""

    name: str
    is_native: bool = False  # of PostgreSQL's own
    rule: OwnershipRule | None = None
    table: Table | None = None  # the one that it writes to: the table itself, a partition of it, or the reverse


@dataclass(frozen=True, slots=True)
class TableOwnership:
    """The rows of a table that a subscription may delete although its publisher does not send their deletion.

    Attributes:
        rule: the rows that belong to the subscription. None: nothing says which ones these are.
        others: the other subscriptions with rows in the table.
    """

    rule: OwnershipRule | None = None
    others: tuple[TableWriter, ...] = ()

    @property
    def is_proven(self) -> bool:
        """Return True if all rows of the rule belong to the subscription, and to no other."""
        return self.rule is not None and not self.doubtful

    @property
    def doubtful(self) -> tuple[TableWriter, ...]:
        """The other subscriptions that may own rows of the rule; all others if there is no rule."""
        rule = self.rule
        if rule is None:
            return self.others
        return tuple(writer for writer in self.others if writer.rule is None or not rule.is_disjoint(writer.rule))

    def may_delete(self, *, delete_extra: bool) -> bool:
        """Return True if rows may be deleted that the publisher does not have, within the rule if there is one.

        Args:
            delete_extra: a person has said that rows of unknown origin are to be deleted. No other subscription can own
                them then.
        """
        return self.is_proven or (delete_extra and not self.others)

    @property
    def names(self) -> str:
        """The names of `doubtful`, for messages."""
        return ", ".join(f'"{writer.name}"' for writer in self.doubtful)


# --- reading ----------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""\s*(?:"((?:[^"]|"")+)"|'((?:[^']|'')*)'|([+-]?\d+(?:\.\d+)?)(?![\w$.])|([^\W\d][\w$]*)|(<=|>=|[.,:()=<>]))""",
    re.ASCII,
)
_WORDS = frozenset(("and", "in", "between", "all", "true", "false"))
_LENGTH = 10_000  # characters of the option


@dataclass(frozen=True, slots=True)
class _Token:
    """A token: a word or symbol in lower case, a quoted name, or a constant. The others are None."""

    word: str | None = None
    name: str | None = None
    constant: Constant | None = None


def parse_ownership(text: str) -> OwnershipRules:
    """Read the option's value; empty means no rules. Raises StatementError (22023)."""
    reader = _RuleReader(text)
    tables: dict[Table, OwnershipRule] = {}
    default: OwnershipRule | None = None
    for table, rule in reader.entries():
        if (default is not None) if table is None else (table in tables):
            raise reader.wrong("Two entries are about the same.")
        if table is None:
            default = rule
        else:
            tables[table] = rule
    return OwnershipRules(tables, default)


class _RuleReader:
    def __init__(self, text: str) -> None:
        self._text = text
        if len(text) > _LENGTH:
            raise self.wrong(f"It is longer than {_LENGTH:,} characters.")
        self._tokens = list(self._cut())
        self._at = 0

    def _cut(self) -> Iterator[_Token]:
        at, end = 0, len(self._text.rstrip())
        while at < end:
            token = _TOKEN.match(self._text, at)
            if token is None or "\0" in token[0]:
                raise self.wrong(f"It cannot be read at character {at + 1}.")
            at = token.end()
            quoted, string, number, word, symbol = token.groups()
            if quoted is not None:
                yield _Token(name=quoted.replace('""', '"'))
            elif string is not None:
                yield _Token(constant=string.replace("''", "'"))
            elif number is not None:
                yield _Token(constant=Decimal(number))
            else:
                yield _Token(word=symbol or word.lower())

    def wrong(self, detail: str) -> StatementError:
        shown = self._text if len(self._text) <= _LENGTH else f"{self._text[:40]}…"
        return StatementError(
            f'invalid value for parameter "{_OPTION}": "{shown}"',
            detail=detail,
            hint="Write [schema.table:] condition [AND condition …], separated by commas. A condition compares a column"
            " with constants by =, <, <=, >, >=, IN (…) or BETWEEN … AND …; or write all.",
            sqlstate=INVALID_PARAMETER_VALUE,
        )

    def _peek(self, further: int = 0) -> _Token:
        at = self._at + further
        return self._tokens[at] if at < len(self._tokens) else _Token()

    def _accept(self, *words: str) -> str | None:
        word = self._peek().word
        if word is None or word not in words:
            return None
        self._at += 1
        return word

    def _expect(self, word: str) -> None:
        if self._accept(word) is None:
            raise self.wrong(f"{word.upper()} is missing.")

    def _name(self, what: str) -> str:
        token = self._peek()
        name = token.name
        if name is None and token.word is not None and token.word.isidentifier() and token.word not in _WORDS:
            name = token.word
        if name is None:
            raise self.wrong(f"{what} is missing.")
        self._at += 1
        return name

    def entries(self) -> Iterator[tuple[Table | None, OwnershipRule]]:
        while self._at < len(self._tokens):
            table = None
            if self._peek(1).word == ".":
                schema = self._name("The schema of a table")
                self._expect(".")
                table = schema, self._name("The name of a table")
                self._expect(":")
            yield table, self._rule()
            if self._at < len(self._tokens) and not (self._accept(",") and self._at < len(self._tokens)):
                raise self.wrong("A comma or an entry is missing.")

    def _rule(self) -> OwnershipRule:
        if self._accept("("):
            rule = self._rule()
            self._expect(")")
            return rule
        if self._accept("all"):
            return ALL_ROWS
        columns: dict[str, Values] = {}
        while True:
            name = self._name("The name of a column")
            values = self._values()
            before = columns.get(name, values)
            if len(values.kinds | before.kinds) > 1:
                raise self.wrong(f"Column {name} is compared with constants of different kinds.")
            values = values.common(before)
            if values.is_empty:
                raise self.wrong(f"Column {name} can have no value.")
            columns[name] = values
            if not self._accept("and"):
                return OwnershipRule(columns)

    def _values(self) -> Values:
        match self._accept("=", "<", "<=", ">", ">=", "in", "between"):
            case "=":
                return Values((self._constant(),))
            case "<" | "<=" as operator:
                return Values(None, None, Bound(self._constant(), operator == "<="))
            case ">" | ">=" as operator:
                return Values(None, Bound(self._constant(), operator == ">="))
            case "in":
                self._expect("(")
                listed = [self._constant()]
                while self._accept(","):
                    listed.append(self._constant())
                self._expect(")")
                return Values(tuple(dict.fromkeys(listed)))
            case "between":
                low = Bound(self._constant(), included=True)
                self._expect("and")
                return Values(None, low, Bound(self._constant(), included=True))
        raise self.wrong("An operator is missing.")

    def _constant(self) -> Constant:
        token = self._peek()
        constant = token.constant
        if token.word in ("true", "false"):
            constant = token.word == "true"
        if constant is None:
            raise self.wrong("A constant is missing.")
        self._at += 1
        return constant
