"""Memory and time for large values and deeply nested types. Without a server."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from subscriber.change_stream.types import containers as nested
from subscriber.change_stream.types.registry import TypeRow, Types
from subscriber.change_stream.types.text import text

SIZE = 20 * 1024 * 1024  # bytes
PLAIN, ESCAPED, DOUBLED = b"x", b'\\\\\\"', b'\\\\""'  # repeated until the value is large

one = nested.CompositeFromText([("a", text)])


@pytest.mark.parametrize(
    ("read", "before", "repeated", "after"),
    [
        (nested.ArrayFromText(text), b'{"', PLAIN, b'"}'),
        (nested.ArrayFromText(text), b'{"', ESCAPED, b'"}'),
        (nested.ArrayFromText(text), b"{", PLAIN, b"}"),
        (one, b"(", PLAIN, b")"),
        (one, b'("', DOUBLED, b'")'),
        (one, b"(", b"[", b")"),
        (nested.RangeFromText(text), b'["', PLAIN, b'",]'),
        (nested.RangeFromText(text), b'["', DOUBLED, b'",]'),
        (nested.MultirangeFromText(text), b'{["', PLAIN, b'",]}'),
    ],
    ids=[
        "array",
        "array escaped",
        "array bare",
        "row",
        "row escaped",
        "row of brackets",
        "range",
        "range escaped",
        "ranges",
    ],
)
def test_a_large_value_takes_three_times_its_size_at_most(
    read: Callable[[bytes], Any], before: bytes, repeated: bytes, after: bytes
) -> None:
    """The received bytes are one of the three."""
    value = before + repeated * (SIZE // len(repeated)) + after
    tracemalloc.start()
    try:
        read(value)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2.1 * len(value)


def row(oid: int, kind: str, part: int = 0, attributes: tuple[tuple[str, int], ...] = ()) -> TypeRow:
    return TypeRow(oid, f"t{oid}", kind, part, ",", attributes)


def test_a_domain_on_many_domains_is_read_as_the_innermost() -> None:
    types = Types()
    types.add([row(20_000 + n, "d", 20_000 + n + 1 if n < 899 else 23) for n in range(900)])
    assert types.get(20_000).text(b"7") == 7
    assert types.get(20_000).name == "t20000"


def test_a_type_that_contains_itself_is_read_as_text_where_it_recurs() -> None:
    types = Types()
    types.add([row(20_001, "c", attributes=(("a", 23), ("b", 20_001), ("c", 20_002))), row(20_002, "a", 20_001)])
    types.add([row(20_003, "d", 20_004), row(20_004, "d", 20_003)])
    assert types.get(20_001).text(b'(1,"(2,,)",)') == {"a": 1, "b": "(2,,)", "c": None}
    assert types.get(20_003).text(b"x") == "x"


def test_deeply_nested_types_are_read_as_text_below_a_limit() -> None:
    types = Types()
    types.add([row(20_000 + n, "c", attributes=(("a", 20_001 + n),)) for n in range(900)])
    assert types.get(20_000).text(b"()") == {"a": None}
    assert types.get(20_000).text(b'("(""()"")")') == {"a": {"a": {"a": None}}}
