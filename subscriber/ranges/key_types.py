"""KeyType: the types of key columns whose order Python computes exactly as the publisher does.

A value is parsed from the publisher's text or binary format. Two values compare as they do on the publisher: numbers
and times by value, bytea and uuid by their bytes, texts of collation C by their bytes in UTF-8. The order of Python's
strings is that of their bytes in UTF-8.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from decimal import Decimal, InvalidOperation
from typing import Any
from uuid import UUID

from subscriber.timestamps import EPOCH_DAY

_numeric = struct.Struct(">hhHH").unpack_from
_NEGATIVE, _SPECIAL = 0x4000, {0xC000: "NaN", 0xD000: "Infinity", 0xF000: "-Infinity"}
_CYCLE = 146_097  # days of 400 years, after which the calendar repeats
_MICROS_PER_DAY = 86_400_000_000
_INFINITE_DAY, _INFINITE_MICROS = (1 << 31) - 1, (1 << 63) - 1
_DATE = re.compile(r"(\d{4,})-(\d\d)-(\d\d)( BC)?")
_TIME = re.compile(r"(\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?")
_MOMENT = re.compile(rf"(\d{{4,}}-\d\d-\d\d) {_TIME.pattern}(?:([+-])(\d\d)(?::(\d\d))?(?::(\d\d))?)?( BC)?")
_ESCAPED = re.compile(rb"\\(\\|[0-7]{3})")


@dataclass(frozen=True, slots=True)
class KeyType:
    """A type: its name in SQL, and the conversion of its values, which Python can compare and hash."""

    name: str
    from_text: Callable[[str], Any]
    from_binary: Callable[[bytes], Any]
    to_text: Callable[[Any], str]
    is_text: bool = False  # its order is that of the type only under collation C, in a database of encoding UTF8


def _signed(data: bytes) -> int:
    return int.from_bytes(data, "big", signed=True)


def _unsigned(data: bytes) -> int:
    return int.from_bytes(data, "big")


def _integer(name: str, from_binary: Callable[[bytes], int] = _signed) -> KeyType:
    return KeyType(name, int, from_binary, str)


def _boolean(text: str) -> int:
    return ("f", "t").index(text)


def _uuid(text: str) -> int:
    return UUID(text).int


def _uuid_text(value: int) -> str:
    return str(UUID(int=value))


def _escaped_byte(found: re.Match[bytes]) -> bytes:
    return b"\\" if found[1] == b"\\" else bytes([int(found[1], 8)])


def _bytea(text: str) -> bytes:
    if text.startswith("\\x"):
        return bytes.fromhex(text[2:])
    return _ESCAPED.sub(_escaped_byte, text.encode())


def _bytea_text(value: bytes) -> str:
    return "\\x" + value.hex()


# --- numeric: (is it NaN, number), because NaN is greater than all numbers and equal to itself --------------------


def _decimal(text: str) -> tuple[bool, Decimal]:
    try:
        number = Decimal(text)
    except InvalidOperation:
        raise ValueError("invalid number") from None
    return (True, Decimal(0)) if number.is_nan() else (False, number)


def _decimal_from_binary(data: bytes) -> tuple[bool, Decimal]:
    """Source: numeric_send() in numeric.c."""
    ndigits, weight, sign, _ = _numeric(data)
    if sign in _SPECIAL:
        return _decimal(_SPECIAL[sign])
    digits = "".join(f"{group:04d}" for group in struct.unpack_from(f">{ndigits}H", data, 8))
    # The constructor never rounds.
    return False, Decimal((int(sign == _NEGATIVE), tuple(map(int, digits)), 4 * (weight - ndigits + 1)))


def _decimal_text(value: tuple[bool, Decimal]) -> str:
    is_nan, number = value
    return "NaN" if is_nan else str(number) if number.is_infinite() else f"{number:f}"


# --- times: days or microseconds since 2000-01-01, as in the binary format -----------------------------------------


def _days_since(text: str) -> int:
    """Parse a date of the ISO format, for example "0044-03-15 BC"."""
    if text in ("infinity", "-infinity"):
        return _INFINITE_DAY if text == "infinity" else -_INFINITE_DAY - 1
    match = _DATE.fullmatch(text)
    if match is None:
        raise ValueError("invalid date")
    year = 1 - int(match[1]) if match[4] else int(match[1])
    cycles, rest = divmod(year - 1, 400)
    return date(rest + 1, int(match[2]), int(match[3])).toordinal() + cycles * _CYCLE - EPOCH_DAY


def _date_text(days: int) -> str:
    if days in (_INFINITE_DAY, -_INFINITE_DAY - 1):
        return "infinity" if days > 0 else "-infinity"
    cycles, rest = divmod(days + EPOCH_DAY - 1, _CYCLE)
    day = date.fromordinal(rest + 1)
    year = day.year + 400 * cycles
    return f"{year if year > 0 else 1 - year:04d}-{day.month:02d}-{day.day:02d}{' BC' if year <= 0 else ''}"


def _micros_of_day(text: str) -> int:
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError("invalid time")
    hours, minutes, seconds = map(int, match.groups()[:3])
    return ((hours * 60 + minutes) * 60 + seconds) * 1_000_000 + int((match[4] or "").ljust(6, "0"))


def _time_text(micros: int) -> str:
    seconds, micros = divmod(micros, 1_000_000)
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}.{micros:06d}"


def _micros_since(text: str) -> int:
    """Parse a timestamp of the ISO format, for example "2024-05-01 12:00:00.5+05:30"."""
    if text in ("infinity", "-infinity"):
        return _INFINITE_MICROS if text == "infinity" else -_INFINITE_MICROS - 1
    match = _MOMENT.fullmatch(text)
    if match is None:
        raise ValueError("invalid timestamp")
    day, time = match[1] + (match[10] or ""), text[len(match[1]) + 1 :]
    parsed = _TIME.match(time)
    assert parsed is not None
    micros = _days_since(day) * _MICROS_PER_DAY + _micros_of_day(parsed[0])
    hours, minutes, seconds = (int(part or 0) for part in match.group(7, 8, 9))
    offset = ((hours * 60 + minutes) * 60 + seconds) * 1_000_000
    return micros + offset if match[6] == "-" else micros - offset


def _moment_text(micros: int) -> str:
    if micros in (_INFINITE_MICROS, -_INFINITE_MICROS - 1):
        return "infinity" if micros > 0 else "-infinity"
    days, rest = divmod(micros, _MICROS_PER_DAY)
    day, _, era = _date_text(days).partition(" ")
    return f"{day} {_time_text(rest)}{' ' * bool(era)}{era}"


def _zoned_text(micros: int) -> str:
    text = _moment_text(micros)
    return text if "infinity" in text else f"{text[:-3]}+00 BC" if text.endswith(" BC") else f"{text}+00"


def _text_type(name: str, from_text: Callable[[str], str] = str) -> KeyType:
    return KeyType(name, from_text, lambda data: from_text(data.decode()), str, is_text=True)


def _unpadded(text: str) -> str:
    return text.rstrip(" ")


# An enum, which has another OID on each server. Only the publisher knows its order.
ENUM = KeyType("", str, bytes.decode, str)

# By the OID of the type, which is the same on all servers.
KEY_TYPES = {
    16: KeyType("pg_catalog.bool", _boolean, _unsigned, "ft".__getitem__),
    17: KeyType("pg_catalog.bytea", _bytea, bytes, _bytea_text),
    19: _text_type("pg_catalog.name"),
    20: _integer("pg_catalog.int8"),
    21: _integer("pg_catalog.int2"),
    23: _integer("pg_catalog.int4"),
    25: _text_type("pg_catalog.text"),
    26: _integer("pg_catalog.oid", _unsigned),
    1042: _text_type("pg_catalog.bpchar", _unpadded),  # trailing blanks do not count
    1043: _text_type("pg_catalog.varchar"),
    1082: KeyType("pg_catalog.date", _days_since, _signed, _date_text),
    1083: KeyType("pg_catalog.time", _micros_of_day, _signed, _time_text),
    1114: KeyType("pg_catalog.timestamp", _micros_since, _signed, _moment_text),
    1184: KeyType("pg_catalog.timestamptz", _micros_since, _signed, _zoned_text),
    1700: KeyType("pg_catalog.numeric", _decimal, _decimal_from_binary, _decimal_text),
    2950: KeyType("pg_catalog.uuid", _uuid, _unsigned, _uuid_text),
}
