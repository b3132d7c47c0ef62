"""Decoders of PostgreSQL's binary formats. They return the same Python objects as the decoders of types/text.py.

Each function takes the bytes of one value, as the type's send function writes it. It raises ValueError, LookupError,
ArithmeticError or struct.error if Python cannot represent the value, or if the bytes are not a value of the type. Row
converts these errors.
"""

from __future__ import annotations

import ipaddress
import struct
import uuid
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

import asyncpg

from subscriber._speedups import compiled
from subscriber.change_stream.types.text import Decode, interval_of
from subscriber.lsn import Lsn
from subscriber.timestamps import EPOCH, EPOCH_DAY, EPOCH_WITHOUT_ZONE

_PAST, _FUTURE = -(1 << 63), (1 << 63) - 1  # -infinity and infinity of timestamps
_PAST_DAY, _FUTURE_DAY = -(1 << 31), (1 << 31) - 1

_int64 = struct.Struct(">q").unpack
_int32 = struct.Struct(">i").unpack
_float8 = struct.Struct(">d").unpack
_float4 = struct.Struct(">f").unpack
_numeric = struct.Struct(">hhHH").unpack_from
_interval = struct.Struct(">qii").unpack
_timetz = struct.Struct(">qi").unpack
_tid = struct.Struct(">IH").unpack
_uint16 = struct.Struct(">H").unpack
_snapshot = struct.Struct(">iqq").unpack_from
_SNAPSHOT_SIZE = struct.calcsize(">iqq")
_WEIGHTS = ("", "C", "B", "A")  # of a position in a tsvector

boolean: Decode = compiled(b"\1".__eq__, "binary_boolean")


@compiled
def integer(value: bytes) -> int:
    return int.from_bytes(value, "big", signed=True)


def unsigned(value: bytes) -> int:
    return int.from_bytes(value, "big")


@compiled
def float8(value: bytes) -> float:
    number: float = _float8(value)[0]
    return number


def float4(value: bytes) -> float:
    number: float = _float4(value)[0]
    return number


@compiled
def numeric(value: bytes) -> Decimal:
    """Decode numeric: a header, then groups of four decimal digits.

    `weight` is the power of 10000 of the first group, `scale` the number of digits after the decimal point.

    Source: numeric_send() in numeric.c.
    """
    ndigits, weight, sign, scale = _numeric(value)
    if sign & 0xC000 == 0xC000:
        return Decimal({0xC000: "NaN", 0xD000: "Infinity", 0xF000: "-Infinity"}[sign])
    groups = struct.unpack_from(f">{ndigits}H", value, 8)
    digits = "".join([f"{group:04d}" for group in groups])
    point = 4 * (weight + 1)  # digits before the decimal point
    if point < 0:
        digits, point = "0" * -point + digits, 0
    digits = digits.ljust(point + scale, "0")[: point + scale]
    whole, fraction = digits[:point] or "0", digits[point:]
    return Decimal(f"{'-' if sign == 0x4000 else ''}{whole}{'.' if fraction else ''}{fraction}")


@compiled
def parse_date(value: bytes) -> date:
    (days,) = _int32(value)
    if days in (_PAST_DAY, _FUTURE_DAY):
        return date.max if days > 0 else date.min
    return date.fromordinal(EPOCH_DAY + days)


def parse_time(value: bytes) -> time:
    return (EPOCH_WITHOUT_ZONE + timedelta(microseconds=_micros_of_day(_int64(value)[0]))).time()


def timetz(value: bytes) -> time:
    micros, west = _timetz(value)  # seconds west of UTC
    zone = timezone(timedelta(seconds=-west))
    return (EPOCH_WITHOUT_ZONE + timedelta(microseconds=_micros_of_day(micros))).time().replace(tzinfo=zone)


def _micros_of_day(micros: int) -> int:
    if micros >= 86_400_000_000:
        raise ValueError("Python has no hour 24")
    return micros


@compiled
def timestamp(value: bytes) -> datetime:
    (micros,) = _int64(value)
    if micros in (_PAST, _FUTURE):
        return datetime.max if micros > 0 else datetime.min
    return EPOCH_WITHOUT_ZONE + timedelta(microseconds=micros)


@compiled
def timestamptz(value: bytes) -> datetime:
    (micros,) = _int64(value)
    if micros in (_PAST, _FUTURE):
        return (datetime.max if micros > 0 else datetime.min).replace(tzinfo=UTC)
    return EPOCH + timedelta(microseconds=micros)


def interval(value: bytes) -> timedelta:
    micros, days, months = _interval(value)
    return interval_of(months, days, 0, micros)


def parse_uuid(value: bytes) -> uuid.UUID:
    return uuid.UUID(bytes=value)


def inet(value: bytes) -> Any:
    """Decode inet or cidr: address family, bits of the mask, 1 for cidr, length of the address, address."""
    address = ipaddress.ip_address(value[4:])
    if value[2]:
        return ipaddress.ip_network((address, value[1]))
    if value[1] != address.max_prefixlen:
        return ipaddress.ip_interface((address, value[1]))
    return address


def parse_bits(value: bytes) -> asyncpg.BitString:
    return asyncpg.BitString.frombytes(value[4:], _int32(value[:4])[0])


def versioned(value: bytes) -> str:
    """Decode jsonb or jsonpath: a version number of one byte, then the text."""
    if value[0] != 1:
        raise ValueError("a version of the type that is not known")
    return value[1:].decode("utf-8", "surrogateescape")


def macaddr(value: bytes) -> str:
    return value.hex(":")


def snapshot(value: bytes) -> tuple[int, int, tuple[int, ...]]:
    """Decode pg_snapshot: the number of in-progress transactions, xmin, xmax, and their xids."""
    count, least, most = _snapshot(value)
    return least, most, struct.unpack_from(f">{count}q", value, _SNAPSHOT_SIZE)


def hstore(value: bytes) -> str:
    """Decode hstore to the text that hstore_out() writes."""
    (count,), pos, pairs = _int32(value[:4]), 4, []
    for _ in range(count):
        words = []
        for _ in range(2):
            (length,) = _int32(value[pos : pos + 4])
            pos += 4
            if length < 0:
                words.append("NULL")
                continue
            word = value[pos : pos + length].decode("utf-8", "surrogateescape")
            pos += length
            words.append('"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"')
        pairs.append("=>".join(words))
    return ", ".join(pairs)


def tsvector(value: bytes) -> str:
    """Decode tsvector to the text that tsvectorout() writes: lexemes with positions and weights."""
    (count,), pos, lexemes = _int32(value[:4]), 4, []
    for _ in range(count):
        end = value.index(b"\0", pos)
        lexeme = _lexeme(value[pos:end])
        (number,) = _uint16(value[end + 1 : end + 3])
        pos = end + 3 + 2 * number
        places = struct.unpack_from(f">{number}H", value, end + 3)
        shown = ",".join([f"{place & 0x3FFF}{_WEIGHTS[place >> 14]}" for place in places])
        lexemes.append(f"{lexeme}:{shown}" if shown else lexeme)
    return " ".join(lexemes)


def _lexeme(value: bytes) -> str:
    written = value.decode("utf-8", "surrogateescape")
    return "'" + written.replace("\\", "\\\\").replace("'", "''") + "'"


def tid(value: bytes) -> tuple[int, int]:
    block, offset = _tid(value)
    return block, offset


def lsn(value: bytes) -> Lsn:
    return Lsn(int.from_bytes(value, "big"))


def _floats(value: bytes) -> list[float]:
    return list(struct.unpack(f">{len(value) // 8}d", value))


def _points(value: bytes) -> list[asyncpg.Point]:
    numbers = _floats(value)
    return [asyncpg.Point(x, y) for x, y in zip(numbers[::2], numbers[1::2], strict=True)]


def point(value: bytes) -> asyncpg.Point:
    return asyncpg.Point(*_floats(value))


def line(value: bytes) -> asyncpg.Line:
    return asyncpg.Line(*_floats(value))


def lseg(value: bytes) -> asyncpg.LineSegment:
    return asyncpg.LineSegment(*_points(value))


def box(value: bytes) -> asyncpg.Box:
    return asyncpg.Box(*_points(value))


def path(value: bytes) -> asyncpg.Path:
    return asyncpg.Path(*_points(value[5:]), is_closed=value[0] == 1)


def polygon(value: bytes) -> asyncpg.Polygon:
    return asyncpg.Polygon(*_points(value[4:]))


def circle(value: bytes) -> asyncpg.Circle:
    x, y, radius = _floats(value)
    return asyncpg.Circle(asyncpg.Point(x, y), radius)
