"""PostgreSQL's types in other databases, and values from the text that PostgreSQL writes.

The type of a column on the target decides how a value is converted: a text column stores the text that PostgreSQL
writes, for every type. So nothing is lost where a type has no counterpart. To use another type for a column, create
the table before the mirror starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, time
from decimal import Decimal
from math import isfinite
from typing import Any
from uuid import UUID

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Date,
    DateTime,
    Double,
    Float,
    Integer,
    LargeBinary,
    Numeric,
    SmallInteger,
    String,
    Text,
    Time,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.types import TypeEngine

from subscriber.targets.sqlalchemy.dialects.mysql import MYSQL

Read = Callable[[str], Any]

KEY_LENGTH = 255  # characters of a text, or bytes, in a key; MySQL has no keys on longer ones
_MAX_DIGITS, _MAX_SCALE = 65, 30  # of MySQL's DECIMAL

_TYPES: dict[int, TypeEngine[Any]] = {
    16: Boolean(),
    20: BigInteger(),
    21: SmallInteger(),
    23: Integer(),
    26: BigInteger(),  # oid
    700: Double(),  # real: as exact as its text
    701: Double(),
    1082: Date(),
    1083: Time().with_variant(mysql.TIME(fsp=6), *MYSQL),
    1114: DateTime().with_variant(mysql.DATETIME(fsp=6), *MYSQL),
    1184: DateTime().with_variant(mysql.DATETIME(fsp=6), *MYSQL),  # in UTC
}
_NUMERIC, _BYTEA = 1700, 17
_TEXT = Text().with_variant(mysql.LONGTEXT(), *MYSQL)
_BYTES = LargeBinary().with_variant(mysql.LONGBLOB(), *MYSQL)
_TEXT_KEY = String(KEY_LENGTH)
_BYTES_KEY = LargeBinary().with_variant(mysql.VARBINARY(KEY_LENGTH), *MYSQL)


def column_type(oid: int, modifier: int, *, in_key: bool) -> TypeEngine[Any]:
    """The type of a column for a built-in type of the publisher; text for all that have no exact counterpart."""
    if oid == _NUMERIC and modifier >= 4:
        digits, scale = (modifier - 4) >> 16 & 0xFFFF, (modifier - 4) & 0x7FF
        if digits <= _MAX_DIGITS and scale <= min(_MAX_SCALE, digits):
            # SQLite would store a number that is nearly the same.
            return Numeric(digits, scale).with_variant(Text(), "sqlite")
    if oid == _BYTEA:
        return _BYTES_KEY if in_key else _BYTES
    return _TYPES.get(oid) or (_TEXT_KEY if in_key else _TEXT)


def reader(column: Column[Any], dialect: str) -> Read | None:
    """Return the function that makes a value for `column` of a text, or raises ValueError. None: there is none."""
    kind = column.type
    if isinstance(kind, JSON):
        return json.loads
    if isinstance(kind, Float):  # those of MySQL would take a Decimal, and make 0 of a small one
        return _float
    if isinstance(kind, DateTime) and kind.timezone and dialect != "sqlite":
        return _instant
    try:
        python = kind.python_type
    except NotImplementedError:
        return None
    if dialect == "sqlite" and python is Decimal:
        return None
    return _READERS.get(python)


def _boolean(text: str) -> bool:
    return {"t": True, "f": False}[text]


def _integer(text: str) -> int:
    return {"t": 1, "f": 0}[text] if text in ("t", "f") else int(text)


def _float(text: str) -> float:
    number = float(text)
    if not isfinite(number):  # SQLite would make it NULL, or be unable to compare it
        raise ValueError
    return number


def _decimal(text: str) -> Decimal:
    number = Decimal(text)
    if not number.is_finite():
        raise ValueError
    return number


def _bytes(text: str) -> bytes:
    """Both settings of bytea_output."""
    if text.startswith("\\x"):
        return bytes.fromhex(text[2:])
    escaped = re.sub(r"\\(\\|[0-7]{3})", lambda m: "\\" if m[1] == "\\" else chr(int(m[1], 8)), text)
    return escaped.encode("latin-1")


def _instant(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def _timestamp(text: str) -> datetime:
    """With a time zone, it becomes UTC."""
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo is None else moment.astimezone(UTC).replace(tzinfo=None)


def _time(text: str) -> time:
    moment = time.fromisoformat(text)
    if moment.tzinfo is not None:
        raise ValueError
    return moment


_READERS: dict[type, Read] = {
    str: str,
    bool: _boolean,
    int: _integer,
    float: _float,
    Decimal: _decimal,
    bytes: _bytes,
    date: date.fromisoformat,
    datetime: _timestamp,
    time: _time,
    UUID: UUID,
}
