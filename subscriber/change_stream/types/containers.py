"""Decoders of arrays, composites, ranges and multiranges, in text and binary format.

Each is an object that takes the bytes of one value when it is called. Its constructor takes the decoders of the parts.

Source: arrayfuncs.c (array_out), rowtypes.c (record_out), rangetypes.c, multirangetypes.c and their send functions.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Any

import asyncpg

from subscriber.change_stream.types.text import Decode

Range = asyncpg.Range[Any]

_dimension = struct.Struct(">ii").unpack_from
_int32_at = struct.Struct(">i").unpack_from

_EMPTY, _LOWER_INC, _UPPER_INC, _LOWER_INF, _UPPER_INF = 0x01, 0x02, 0x04, 0x08, 0x10

# Quantifiers are possessive, because backtracking takes up to 130 times the memory of the value.
# A quoted element of an array, with backslashes. Other elements end at a delimiter or brace.
_QUOTED = rb'"((?:[^"\\]++|\\.)*+)"'
# In composites and ranges, a quote inside quotes is doubled. Only ranges have brackets.
_QUOTED_FIELD = rb'"(?:[^"\\]++|\\.|"")*+"'
_FIELD = re.compile(rb'%s|[^,()"\\]*+' % _QUOTED_FIELD, re.DOTALL)
_BOUND = re.compile(rb'%s|[^,()\[\]"\\]*+' % _QUOTED_FIELD, re.DOTALL)
_QUOTE = ord('"')
_BEHIND = (b",", b")", b"]")


class ArrayFromText:
    """Decodes `{1,NULL,{2,3}}` to nested lists. The array may have a prefix with its bounds."""

    def __init__(self, element: Decode, delimiter: str = ",") -> None:
        self._element = element
        self._token = re.compile(
            rb'[{}%s]|%s|[^{}%s"]++' % ((mark := re.escape(delimiter.encode())), _QUOTED, mark), re.DOTALL
        )
        self._delimiter = delimiter.encode()

    def __call__(self, value: bytes) -> list[Any]:
        outer: list[Any] = []
        open_lists = [outer]
        start = value.find(b"=") + 1 if value.startswith(b"[") else 0
        for token in self._token.finditer(value, start):
            quoted, end = token.span(1)
            if quoted >= 0:
                open_lists[-1].append(self._element(_unescaped(value, quoted, end)))
                continue
            written = token[0]
            if written == b"{":
                inner: list[Any] = []
                open_lists[-1].append(inner)
                open_lists.append(inner)
            elif written == b"}":
                open_lists.pop()
            elif written != self._delimiter:
                open_lists[-1].append(None if written == b"NULL" else self._element(written))
        (array,) = outer
        return list(array)


class ArrayFromBinary:
    """Decodes an array in binary format to nested lists."""

    def __init__(self, element: Decode) -> None:
        self._element = element

    def __call__(self, value: bytes) -> list[Any]:
        ndim = _int32_at(value)[0]
        if not ndim:
            return []
        sizes = [_dimension(value, 12 + 8 * number)[0] for number in range(ndim)]
        elements, _ = _read(value, 12 + 8 * ndim, _product(sizes))
        flat = [None if element is None else self._element(element) for element in elements]
        for size in reversed(sizes[1:]):
            flat = [flat[start : start + size] for start in range(0, len(flat), size)]
        return flat


def _product(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def _read(value: bytes, pos: int, count: int) -> tuple[list[bytes | None], int]:
    """Return `count` values, each with a length before it, and the offset after the last one. Length -1 is NULL."""
    elements: list[bytes | None] = []
    for _ in range(count):
        length = _int32_at(value, pos)[0]
        pos += 4
        if length < 0:
            elements.append(None)
        else:
            elements.append(value[pos : pos + length])
            pos += length
    return elements, pos


def composite_fields(value: bytes) -> list[bytes | None]:
    """Return the texts of the fields of a composite, as `(1,"x y",)`. A composite without attributes has one field.

    Raises:
        ValueError: the value is no composite.
    """
    fields: list[bytes | None] = []
    end = 0
    while not fields or end + 1 < len(value):
        start, end = _span(_FIELD, value, end + 1)
        fields.append(_unquoted(value, start, end) if start < end else None)
    return fields


class CompositeFromText:
    """Decodes `(1,"x y",)` to a dictionary by attribute name."""

    def __init__(self, attributes: Sequence[tuple[str, Decode]]) -> None:
        self._attributes = attributes

    def __call__(self, value: bytes) -> dict[str, Any]:
        values: dict[str, Any] = {}
        end = 0
        for name, decode in self._attributes:
            start, end = _span(_FIELD, value, end + 1)
            values[name] = decode(_unquoted(value, start, end)) if start < end else None
        if end + 1 != len(value) and self._attributes:
            raise ValueError("the type has other attributes than the publisher's catalog says")
        return values


class CompositeFromBinary:
    """Decodes a composite in binary format to a dictionary by attribute name."""

    def __init__(self, attributes: Sequence[tuple[str, Decode]]) -> None:
        self._attributes = attributes

    def __call__(self, value: bytes) -> dict[str, Any]:
        values: dict[str, Any] = {}
        pos = 4
        if _int32_at(value)[0] != len(self._attributes):
            raise ValueError("the type has other attributes than the publisher's catalog says")
        for name, decode in self._attributes:
            (field,), pos = _read(value, pos + 4, 1)
            values[name] = None if field is None else decode(field)
        return values


def _span(pattern: re.Pattern[bytes], value: bytes, pos: int) -> tuple[int, int]:
    """Return the start and end offsets of the field at `pos`. Raises ValueError if no delimiter follows the field."""
    bounds = pattern.match(value, pos)
    if bounds is None or value[bounds.end() : bounds.end() + 1] not in _BEHIND:
        raise ValueError("a field that does not end")
    return bounds.span()


# _unquoted() and _unescaped() take offsets and cut the part themselves. A part that is passed as an argument would stay
# in memory until they return.


def _unquoted(value: bytes, start: int, end: int) -> bytes:
    """Return the field `value[start:end]` without quotes.

    The output functions quote a field as a whole or not at all. They double quotes and backslashes inside quotes.
    """
    if value[start] != _QUOTE:
        return value[start:end]
    return _unescaped(value, start + 1, end - 1, doubled=True)


def _unescaped(value: bytes, start: int, end: int, *, doubled: bool = False) -> bytes:
    """Return `value[start:end]` without the backslashes that escape characters. `doubled`: quotes are doubled too."""
    part = value[start:end]
    if doubled:
        part = part.replace(b'""', b'"')
    if b"\\" in part:
        # NUL, which no value contains, marks the escaped backslashes. They stay.
        part = part.replace(b"\\\\", b"\0")
        part = part.replace(b"\\", b"")
        part = part.replace(b"\0", b"\\")
    return part


class RangeFromText:
    """Decodes `[1,5)` or `empty` to an asyncpg.Range."""

    def __init__(self, bound: Decode) -> None:
        self._bound = bound

    def __call__(self, value: bytes) -> Range:
        return self.read(value, 0)[0]

    def read(self, value: bytes, pos: int) -> tuple[Range, int]:
        """Return the range at offset `pos`, and the offset after it."""
        if value.startswith(b"empty", pos):
            return asyncpg.Range(empty=True), pos + 5
        start, comma = _span(_BOUND, value, pos + 1)
        lower = self._bound(_unquoted(value, start, comma)) if start < comma else None
        start, end = _span(_BOUND, value, comma + 1)
        upper = self._bound(_unquoted(value, start, end)) if start < end else None
        end += 1
        value_range = asyncpg.Range(
            lower,
            upper,
            lower_inc=value[pos : pos + 1] == b"[",
            upper_inc=value[end - 1 : end] == b"]",
        )
        return value_range, end


class RangeFromBinary:
    """Decodes a range in binary format to an asyncpg.Range."""

    def __init__(self, bound: Decode) -> None:
        self._bound = bound

    def __call__(self, value: bytes) -> Range:
        flags, pos = value[0], 1
        if flags & _EMPTY:
            return asyncpg.Range(empty=True)
        count = (not flags & _LOWER_INF) + (not flags & _UPPER_INF)
        bounds = [None if bound is None else self._bound(bound) for bound in _read(value, pos, count)[0]]
        lower = None if flags & _LOWER_INF else bounds.pop(0)
        upper = None if flags & _UPPER_INF else bounds.pop(0)
        return asyncpg.Range(lower, upper, lower_inc=bool(flags & _LOWER_INC), upper_inc=bool(flags & _UPPER_INC))


class MultirangeFromText:
    """Decodes `{[1,5),[7,9)}` to a list of ranges."""

    def __init__(self, bound: Decode) -> None:
        self._range = RangeFromText(bound)

    def __call__(self, value: bytes) -> list[Range]:
        members = []
        pos = 1
        while pos < len(value) - 1:
            member, pos = self._range.read(value, pos)
            members.append(member)
            pos += 1
        return members


class MultirangeFromBinary:
    """Decodes a multirange in binary format to a list of ranges."""

    def __init__(self, bound: Decode) -> None:
        self._range = RangeFromBinary(bound)

    def __call__(self, value: bytes) -> list[Range]:
        ranges, _ = _read(value, 4, _int32_at(value)[0])
        return [self._range(member) for member in ranges if member is not None]
