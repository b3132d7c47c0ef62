"""The index of subtransactions compared with a list, with blocks so small that most of the index is in the file."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from subscriber.spool.subxact_index import INDEX_ENTRIES, SubxactIndex


class Filed(SubxactIndex):
    """With a file: a list of blocks."""

    def __init__(self, entries: int = INDEX_ENTRIES) -> None:
        super().__init__(entries)
        self.file = b""
        self.read = 0

    def settle(self) -> None:
        while block := self.excess():
            self.file = self.file[: self.size] + block
            self.spilled()

    def rollback(self, xid: int) -> tuple[int, int] | None:
        if xid not in self:
            return None
        while (cut := self.cut(xid)) is None:
            self.read += 1
            self.restore(self.file[self.size - self.block_size : self.size])
        return cut


# The xids of one transaction are near one another, or were when the server was slow, or wrap around.
xids = st.one_of(st.integers(3, 40), st.integers(3, 2**20), st.integers(2**32 - 20, 2**32 - 1))
steps = st.lists(st.tuples(st.sampled_from(["change", "change", "change", "settle", "rollback"]), xids), max_size=200)


@settings(max_examples=300)
@given(steps, st.integers(1, 4))
def test_the_index_knows_what_a_list_knows(steps: list[tuple[str, int]], block: int) -> None:
    index, entries, offset = Filed(block), list[tuple[int, int, int]](), 0
    for number, (step, xid) in enumerate(steps):
        known = [entry[0] for entry in entries]
        assert (xid in index) == (xid in known)
        if step == "settle":
            index.settle()
            assert len(entries) - index.blocks * block < 2 * block
        elif step == "rollback":
            expected = entries[known.index(xid)] if xid in known else None
            assert index.rollback(xid) == (expected and expected[1:])
            del entries[known.index(xid) if xid in known else len(entries) :]
        elif xid not in known:
            offset += 1 + number
            index.add(xid, offset, number)
            entries.append((xid, offset, number))
    for xid, *place in reversed(entries):
        assert index.rollback(xid) == tuple(place)


def test_late_aborts_among_very_many_do_not_read_the_file() -> None:
    index = Filed()
    for xid in range(1000, 1000 + 4 * INDEX_ENTRIES):
        index.add(xid, xid * 100, xid)
        if xid % INDEX_ENTRIES == 0:
            index.settle()
    index.settle()
    assert index.blocks
    last = 1000 + 4 * INDEX_ENTRIES
    for xid in range(last, last + 1000):
        index.add(xid, xid * 100, xid)
        assert index.rollback(xid) == (xid * 100, xid)
        assert index.rollback(xid) is None
    assert index.read == 0
