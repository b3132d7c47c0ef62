"""The text of a column's value, as the target prints it.

**Purpose.** A publisher's column may have another type than the target's. Replication sends the value's text, and the
target reads it as the value of a column. The publisher computes here the text that the target would print then.

**Invariants.**

- The result never equals the target's text if the target cannot hold the value: a text that is too long is not cut, and
  an integer that is out of range is not converted.
- Each text has collation C. Another collation can make different texts equal, and give them one hash.

**Failure cases.** Some conversions raise an error of class 22, data exception. Publishers since 16 check a value first.
On an earlier publisher the comparison of the table ends, and the table is reported as not compared.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from subscriber.quoting import identifier, literal

_C = 'COLLATE pg_catalog."C"'
_INTEGERS = frozenset(("smallint", "integer", "bigint"))
_LENGTH = re.compile(r"(character varying|character)\((\d+)\)")
_SCALE = re.compile(r"numeric\(\d+,(-?\d+)\)")
_CUT_ELEMENTS = re.compile(r"((?:character|bit)(?: varying)?)\(\d+\)\[\]")
# PostgreSQL 19 prints pg_lsn with leading zeros.
_NORMAL_LSN = "pg_catalog.regexp_replace({}, '/0+(?=[0-9A-F])', '/', 'g')"
_NORMAL_FORMS = {"pg_lsn": _NORMAL_LSN, "pg_lsn[]": _NORMAL_LSN}  # of texts that differ between versions
# SQL for the value to hash, by the OID of the type. Two values have one hash only if their texts are the same.
# The hash of an int8 combines its halves, so that 1 and 4294967296 have one. The hash of its bytes does not. A numeric
# has its scale in its bytes. Types that are not listed are hashed as text: a float has two zeros and several NaNs.
_BYTES = {20: "int8send", 1083: "time_send", 1114: "timestamp_send", 1184: "timestamptz_send", 1700: "numeric_send"}
HASHED_VALUES = {
    **dict.fromkeys((16, 17, 21, 23, 26, 1082, 2950), "{}"),
    # The hash of a value under a nondeterministic collation is that of all values that are equal to it.
    **dict.fromkeys((25, 1043), f"{{}} {_C}"),
    **{oid: f"pg_catalog.{function}({{}})" for oid, function in _BYTES.items()},
}


@dataclass(frozen=True, slots=True)
class Conversion:
    """The conversion of a publisher's column to the type of the target.

    Attributes:
        source: the publisher's type, as format_type() prints it; the base type of a domain.
        target: the target's.
        checks_input: the publisher has pg_input_is_valid(), as PostgreSQL 16 and later do.
    """

    source: str
    target: str
    checks_input: bool = False

    def apply(self, text: str) -> str:
        """Return SQL for the text that the target prints for the value with this `text`."""
        source, target = self.source, self.target
        is_number = source in _INTEGERS or source.startswith("numeric")
        if target in ("text", "character varying") or (is_number and target in (*_INTEGERS, "numeric")):
            return text
        if source.startswith("bit") and target.startswith("bit"):
            return text
        if match := _LENGTH.fullmatch(target):
            return _fitting(text, int(match[2]), padded=match[1] == "character")
        if (match := _SCALE.fullmatch(target)) and is_number:
            return f"pg_catalog.round({text}::pg_catalog.numeric, {match[1]})::pg_catalog.text"
        if not self.checks_input:
            # A cast would cut the elements of an array, which an assignment does not.
            uncut = _CUT_ELEMENTS.sub(r"\1[]", target)
            return f"pg_catalog.concat({text}::{uncut})"
        is_valid = f"pg_catalog.pg_input_is_valid({text}, {literal(target)})"
        return f"CASE WHEN {is_valid} THEN pg_catalog.concat({text}::{target}) ELSE {text} END"


def _fitting(text: str, length: int, *, padded: bool) -> str:
    """Return SQL for a text in a column of that length. Only blanks are cut, as by an assignment."""
    rest = f"pg_catalog.rtrim(pg_catalog.substr({text}, {length + 1})) = ''"
    fitting = f"pg_catalog.substr({text}, 1, {length})"
    if padded:
        fitting = f"pg_catalog.rpad({fitting}, {length})"
    return f"CASE WHEN {rest} THEN {fitting} ELSE {text} END"


@dataclass(frozen=True, slots=True)
class ComparedColumn:
    """One side of a compared column.

    Attributes:
        name: the column's name on this side.
        type: the column's type on this side, as format_type() prints it; the base type of a domain.
        conversion: of the publisher's side, if the types differ.
        equal_type: the type in which an index finds a value by its text. None: only the texts are compared.
        hashed: SQL for the value to hash, see HASHED_VALUES. None: its text is hashed.
    """

    name: str
    type: str = ""
    conversion: Conversion | None = None
    equal_type: str | None = None
    hashed: str | None = None

    @property
    def text(self) -> str:
        """Return SQL for the value's text; NULL for NULL.

        It uses the type's own output function, because a cast to text truncates char(n).
        """
        name = identifier(self.name)
        text = f"{_NORMAL_FORMS.get(self.type, '{}').format(f'pg_catalog.concat({name})')} {_C}"
        if self.conversion is not None:
            text = f"({self.conversion.apply(text)}) {_C}"
        return f"CASE WHEN {name} IS DISTINCT FROM NULL THEN {text} END"  # IS NOT NULL checks a composite's fields

    @property
    def value(self) -> str:
        """Return SQL for the value that is hashed."""
        return self.text if self.hashed is None else self.hashed.format(identifier(self.name))
