"""Records are read as they were written, and never partially."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from subscriber.spool.record_format import HEADER, HEADER_SIZE, Record, end, first, split

changes = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.binary(max_size=40)), max_size=20)


def written(changes: list[tuple[int, bytes]]) -> tuple[bytes, list[Record]]:
    """Return the bytes, and the records that they represent."""
    data, records = b"", []
    for xid, message in changes:
        records.append((len(data), xid, message))
        data += HEADER.pack(len(message), xid) + message
    return data, records


def test_a_record_is_its_length_its_transaction_and_its_message() -> None:
    assert HEADER.pack(2, 745) + b"IX" == bytes.fromhex("00000002 000002e9 4958")


@given(changes, st.integers(0, 2**40))
def test_records_come_back_with_their_place_in_the_file(changes: list[tuple[int, bytes]], base: int) -> None:
    data, records = written(changes)
    parts = split(data, base)
    assert parts == [(base + offset, xid, message) for offset, xid, message in records]
    assert not parts or end(parts[-1]) == base + len(data)


@given(changes.filter(bool), st.data())
def test_a_record_that_is_not_whole_is_left_out(changes: list[tuple[int, bytes]], data: st.DataObject) -> None:
    whole, records = written(changes)
    cut = data.draw(st.integers(0, len(whole)))
    assert split(whole[:cut], 0) == [record for record in records if end(record) <= cut]


@given(changes.filter(bool), st.integers(0, 20))
def test_the_first_record_says_how_long_it_is(changes: list[tuple[int, bytes]], given: int) -> None:
    whole, records = written(changes)
    _, xid, message = records[0]
    assert first(whole[:given]) == ((len(message), xid) if given >= HEADER_SIZE else (0, 0))
