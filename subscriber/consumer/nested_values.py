"""Arrays, composites, ranges and multiranges, from text and from binary, given how their parts are read.

Source: array_in.c (array_out), rowtypes.c (record_out), rangetypes.c, multirangetypes.c and their send functions.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Any

import asyncpg

from subscriber.consumer.text_values import Decode

Range = asyncpg.Range[Any]

_dimension = struct.Struct(">ii").unpack_from
_int32_at = struct.Struct(">i").unpack_from

_EMPTY, _LOWER_INC, _UPPER_INC, _LOWER_INF, _UPPER_INF = 0x01, 0x02, 0x04, 0x08, 0x10

# One element: quoted (with backslashes), or everything up to a delimiter or brace.
_QUOTED = rb'"((?:[^"\\]|\\.)*)"'
_UNESCAPE = re.compile(rb"\\(.)", re.DOTALL)
# In a row and in a range a quote inside quotes may be doubled.
_FIELD = re.compile(rb'((?:"(?:[^"\\]|\\.|"")*"|\\.|[^,()\[\]"\\])*)', re.DOTALL)
_UNESCAPE_FIELD = re.compile(rb'""|\\(.)', re.DOTALL)


class ArrayFromText:
    """`{1,NULL,{2,3}}`, perhaps with its bounds in front, as nested lists."""

    def __init__(self, element: Decode, delimiter: str = ",") -> None:
        self._element = element
        self._token = re.compile(
            rb'[{}%s]|%s|[^{}%s"]+' % ((mark := re.escape(delimiter.encode())), _QUOTED, mark), re.DOTALL
        )
        self._delimiter = delimiter.encode()

    def __call__(self, value: bytes) -> list[Any]:
        outer: list[Any] = []
        open_lists = [outer]
        start = value.find(b"=") + 1 if value.startswith(b"[") else 0
        for token in self._token.finditer(value, start):
            written = token[0]
            if written == b"{":
                inner: list[Any] = []
                open_lists[-1].append(inner)
                open_lists.append(inner)
            elif written == b"}":
                open_lists.pop()
            elif token[1] is not None:
                open_lists[-1].append(self._element(_UNESCAPE.sub(rb"\1", token[1])))
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
        fields: list[bytes] = []
        pos = 1
        while pos < len(value):
            field = _FIELD.match(value, pos)
            assert field is not None  # it matches the empty string, too
            fields.append(field[1])
            pos = field.end() + 1
        return {
            name: decode(_unquoted(field)) if field else None
            for (name, decode), field in zip(self._attributes, fields, strict=True)
        }


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


def _unquoted(field: bytes) -> bytes:
    """The output functions quote a field as a whole or not at all."""
    return _UNESCAPE_FIELD.sub(_unescape, field[1:-1]) if field.startswith(b'"') else field


def _unescape(found: re.Match[bytes]) -> bytes:
    escaped: bytes | None = found[1]
    return b'"' if escaped is None else escaped


class RangeFromText:
    def __init__(self, bound: Decode) -> None:
        self._bound = bound

    def __call__(self, value: bytes) -> Range:
        return self.read(value, 0)[0]

    def read(self, value: bytes, pos: int) -> tuple[Range, int]:
        """The range that starts at `pos`, and the position after it."""
        if value.startswith(b"empty", pos):
            return asyncpg.Range(empty=True), pos + 5
        lower = _FIELD.match(value, pos + 1)
        assert lower is not None
        upper = _FIELD.match(value, lower.end() + 1)
        assert upper is not None
        end = upper.end() + 1
        found = asyncpg.Range(
            self._bound(_unquoted(lower[1])) if lower[1] else None,
            self._bound(_unquoted(upper[1])) if upper[1] else None,
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
