"""Arrays, composites, ranges and multiranges, from text and from binary, given how their parts are read.

Source: array_in.c (array_out), rowtypes.c (record_out), rangetypes.c, multirangetypes.c and their send functions.
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

# Quantifiers are possessive: to go back takes up to 130 times the memory of the value.
# One element: quoted (with backslashes), or everything up to a delimiter or brace.
_QUOTED = rb'"((?:[^"\\]++|\\.)*+)"'
# In a row and in a range a quote inside quotes is doubled. Brackets have a meaning in ranges only.
_QUOTED_FIELD = rb'"(?:[^"\\]++|\\.|"")*+"'
_FIELD = re.compile(rb'%s|[^,()"\\]*+' % _QUOTED_FIELD, re.DOTALL)
_BOUND = re.compile(rb'%s|[^,()\[\]"\\]*+' % _QUOTED_FIELD, re.DOTALL)
_QUOTE = ord('"')
_BEHIND = (b",", b")", b"]")


class ArrayFromText:
    """`{1,NULL,{2,3}}`, perhaps with its bounds in front, as nested lists."""

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
    """`count` values with their lengths in front; -1 is NULL."""
    found: list[bytes | None] = []
    for _ in range(count):
        length = _int32_at(value, pos)[0]
        pos += 4
        if length < 0:
            found.append(None)
        else:
            found.append(value[pos : pos + length])
            pos += length
    return found, pos


class CompositeFromText:
    """`(1,"x y",)` as a dictionary by attribute name."""

    def __init__(self, attributes: Sequence[tuple[str, Decode]]) -> None:
        self._attributes = attributes

    def __call__(self, value: bytes) -> dict[str, Any]:
        found: dict[str, Any] = {}
        end = 0
        for name, decode in self._attributes:
            start, end = _span(_FIELD, value, end + 1)
            found[name] = decode(_unquoted(value, start, end)) if start < end else None
        if end + 1 != len(value) and self._attributes:
            raise ValueError("the type has other attributes than the publisher's catalog says")
        return found


class CompositeFromBinary:
    def __init__(self, attributes: Sequence[tuple[str, Decode]]) -> None:
        self._attributes = attributes

    def __call__(self, value: bytes) -> dict[str, Any]:
        found: dict[str, Any] = {}
        pos = 4
        if _int32_at(value)[0] != len(self._attributes):
            raise ValueError("the type has other attributes than the publisher's catalog says")
        for name, decode in self._attributes:
            (field,), pos = _read(value, pos + 4, 1)
            found[name] = None if field is None else decode(field)
        return found


def _span(pattern: re.Pattern[bytes], value: bytes, pos: int) -> tuple[int, int]:
    """Where a field that starts at `pos` begins and ends. Raises ValueError if something else is behind it."""
    found = pattern.match(value, pos)
    if found is None or value[found.end() : found.end() + 1] not in _BEHIND:
        raise ValueError("a field that does not end")
    return found.span()


# These two cut the part out themselves, one step after the other: a caller's argument would stay in memory meanwhile.


def _unquoted(value: bytes, start: int, end: int) -> bytes:
    """A field. The output functions quote it as a whole or not at all, and double quotes and backslashes."""
    if value[start] != _QUOTE:
        return value[start:end]
    return _unescaped(value, start + 1, end - 1, doubled=True)


def _unescaped(value: bytes, start: int, end: int, *, doubled: bool = False) -> bytes:
    """Without the backslashes before other characters. A value has no NUL, which stands for those that stay.

    `doubled`: a quote is written twice.
    """
    part = value[start:end]
    if doubled:
        part = part.replace(b'""', b'"')
    if b"\\" in part:
        part = part.replace(b"\\\\", b"\0")
        part = part.replace(b"\\", b"")
        part = part.replace(b"\0", b"\\")
    return part


class RangeFromText:
    def __init__(self, bound: Decode) -> None:
        self._bound = bound

    def __call__(self, value: bytes) -> Range:
        return self.read(value, 0)[0]

    def read(self, value: bytes, pos: int) -> tuple[Range, int]:
        """The range that starts at `pos`, and the position after it."""
        if value.startswith(b"empty", pos):
            return asyncpg.Range(empty=True), pos + 5
        start, comma = _span(_BOUND, value, pos + 1)
        lower = self._bound(_unquoted(value, start, comma)) if start < comma else None
        start, end = _span(_BOUND, value, comma + 1)
        upper = self._bound(_unquoted(value, start, end)) if start < end else None
        end += 1
        found = asyncpg.Range(
            lower,
            upper,
            lower_inc=value[pos : pos + 1] == b"[",
            upper_inc=value[end - 1 : end] == b"]",
        )
        return found, end


class RangeFromBinary:
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
    """`{[1,5),[7,9)}` as a list of ranges."""

    def __init__(self, bound: Decode) -> None:
        self._range = RangeFromText(bound)

    def __call__(self, value: bytes) -> list[Range]:
        found = []
        pos = 1
        while pos < len(value) - 1:
            one, pos = self._range.read(value, pos)
            found.append(one)
            pos += 1
        return found


class MultirangeFromBinary:
    def __init__(self, bound: Decode) -> None:
        self._range = RangeFromBinary(bound)

    def __call__(self, value: bytes) -> list[Range]:
        ranges, _ = _read(value, 4, _int32_at(value)[0])
        return [self._range(one) for one in ranges if one is not None]
