"""Decoders of PostgreSQL's text formats. They return the Python objects that asyncpg returns.

Each function takes the bytes of one value, as the type's output function writes it. It raises ValueError or
ArithmeticError if Python cannot represent the value, such as the year 10000. Row converts these errors.

Infinite dates and times become the maximum and minimum of the Python type, as in asyncpg. Unlike there, an infinite
timestamptz has a time zone, so that it can be compared.
"""

from __future__ import annotations

import ipaddress
import re
import struct
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from operator import methodcaller
from typing import Any

import asyncpg

from subscriber._speedups import compiled
from subscriber.lsn import Lsn

Decode = Callable[[bytes], Any]

# Bytes that are not UTF-8 (a publisher in SQL_ASCII) become surrogate escapes, which encode to the same bytes.
text: Decode = compiled(methodcaller("decode", "utf-8", "surrogateescape"), "text_text")
boolean: Decode = compiled(b"t".__eq__, "text_boolean")
integer: Decode = compiled(int, "text_integer")
float8: Decode = compiled(float, "text_float8")

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|Infinity|NaN)", re.IGNORECASE)
_INTERVAL_PART = re.compile(r"([-+]?\d+) (year|mon|day)s?")
_INTERVAL_TIME = re.compile(r"([-+]?)(\d+):(\d\d):(\d\d(?:\.\d+)?)$")
_from_iso = datetime.fromisoformat
_FLOAT4 = struct.Struct(">f")
_OCTAL = re.compile(rb"\\(\\|[0-7]{3})")


def float4(value: bytes) -> float:
    """Decode real to the exact number of the server. Its text is shorter and usually another double."""
    number: float = _FLOAT4.unpack(_FLOAT4.pack(float(value)))[0]
    return number


@compiled
def numeric(value: bytes) -> Decimal:
    return Decimal(value.decode())


def char(value: bytes) -> bytes:
    """Decode "char" to its byte. The output function writes a byte above ASCII in octal, and zero as an empty text."""
    if len(value) == 4 and value.startswith(b"\\"):
        return bytes([int(value[1:], 8)])
    return value or b"\0"


def vector(value: bytes) -> list[int]:
    """Decode oidvector or int2vector, which have no braces."""
    return [int(number) for number in value.split()]


def snapshot(value: bytes) -> tuple[int, int, tuple[int, ...]]:
    """Decode pg_snapshot to xmin, xmax, and the xids of the in-progress transactions between both."""
    least, most, between = value.split(b":")
    return int(least), int(most), tuple([int(xid) for xid in between.split(b",") if xid])


def bytea(value: bytes) -> bytes:
    """Decode bytea in either format of bytea_output."""
    if value.startswith(b"\\x"):
        return bytes.fromhex(value[2:].decode())
    return _OCTAL.sub(lambda m: b"\\" if m[1] == b"\\" else bytes([int(m[1], 8)]), value)


@compiled
def parse_date(value: bytes) -> date:
    if value.endswith(b"infinity"):
        return date.min if value.startswith(b"-") else date.max
    return date.fromisoformat(value.decode())


def parse_time(value: bytes) -> time:
    return time.fromisoformat(value.decode())


@compiled
def timestamp(value: bytes) -> datetime:
    try:
        return _from_iso(value.decode())
    except ValueError:
        return _infinite(value)


@compiled
def timestamptz(value: bytes) -> datetime:
    try:
        return _from_iso(value.decode())
    except ValueError:
        return _infinite(value).replace(tzinfo=UTC)


def _infinite(value: bytes) -> datetime:
    if not value.endswith(b"infinity"):
        raise ValueError("a time that Python has not")
    return datetime.min if value.startswith(b"-") else datetime.max


def interval(value: bytes) -> timedelta:
    """Decode interval. Years have 365 days and months 30, as in asyncpg."""
    written = value.decode()
    days = 0
    months = 0
    for number, unit in _INTERVAL_PART.findall(written):
        if unit == "day":
            days += int(number)
        else:
            months += int(number) * (12 if unit == "year" else 1)
    seconds = 0.0
    micros = 0
    if clock := _INTERVAL_TIME.search(written):
        sign = -1 if clock[1] == "-" else 1
        whole, _, fraction = clock[4].partition(".")
        seconds = sign * (int(clock[2]) * 3600 + int(clock[3]) * 60 + int(whole))
        micros = sign * int(fraction.ljust(6, "0")) if fraction else 0
    elif not _INTERVAL_PART.search(written):
        raise ValueError("not an interval that Python can hold")
    return interval_of(months, days, seconds, micros)


def interval_of(months: int, days: int, seconds: float, micros: int) -> timedelta:
    sign = -1 if months < 0 else 1
    years, months = divmod(abs(months), 12)
    return timedelta(days=days + sign * (months * 30 + years * 365), seconds=seconds, microseconds=micros)


def parse_uuid(value: bytes) -> uuid.UUID:
    return uuid.UUID(value.decode())


def inet(value: bytes) -> Any:
    """Decode inet to an address, or to an interface if the mask is not that of a single host."""
    written = value.decode()
    return ipaddress.ip_interface(written) if "/" in written else ipaddress.ip_address(written)


def cidr(value: bytes) -> Any:
    return ipaddress.ip_network(value.decode())


def parse_bits(value: bytes) -> asyncpg.BitString:
    return asyncpg.BitString(value.decode())  # type: ignore[arg-type]  # the stubs have bytes there


def tid(value: bytes) -> tuple[int, int]:
    block, _, offset = value[1:-1].partition(b",")
    return int(block), int(offset)


def lsn(value: bytes) -> Lsn:
    return Lsn.parse(value.decode())


def _numbers(value: bytes) -> list[float]:
    return [float(number) for number in _NUMBER.findall(value.decode())]


def _points(value: bytes) -> list[asyncpg.Point]:
    numbers = _numbers(value)
    return [asyncpg.Point(x, y) for x, y in zip(numbers[::2], numbers[1::2], strict=True)]


def point(value: bytes) -> asyncpg.Point:
    return _points(value)[0]


def line(value: bytes) -> asyncpg.Line:
    return asyncpg.Line(*_numbers(value))


def lseg(value: bytes) -> asyncpg.LineSegment:
    return asyncpg.LineSegment(*_points(value))


def box(value: bytes) -> asyncpg.Box:
    return asyncpg.Box(*_points(value))


def path(value: bytes) -> asyncpg.Path:
    return asyncpg.Path(*_points(value), is_closed=value.startswith(b"("))


def polygon(value: bytes) -> asyncpg.Polygon:
    return asyncpg.Polygon(*_points(value))


def circle(value: bytes) -> asyncpg.Circle:
    x, y, radius = _numbers(value)
    return asyncpg.Circle(asyncpg.Point(x, y), radius)
