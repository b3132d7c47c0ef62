"""Subtransaction index: where in the changes file each subtransaction of a transaction begins. No I/O.

Purpose:
    When a subtransaction aborts, the changes file is cut to the first change of that subtransaction. A loop with an
    exception block makes a subtransaction for every row, so all but the last 64 Ki entries are written to a file, in
    blocks of equal size. The block written last is the first to be read back.

Invariants:
    - A cut removes exactly the aborted changes. Subtransactions nest, and an abort arrives before any change that was
      made after it. All later changes in the file belong to the subtransaction or to subtransactions inside it.
    - An entry has 20 bytes: xid, offset of the first change, number of changes before it.
    - Entries are in the order of those first changes, not of xids: a parent often makes its first change after its
      child. Entries are searched from the end, which costs no more than the entries that the search drops.
    - A bit map records which xids have an entry. A new subtransaction, or one that was removed with its parent, is
      not searched for.

Source:
    subxact_info_add(), stream_abort_internal() in worker.c.
"""

from __future__ import annotations

from array import array

INDEX_ENTRIES = 32 * 1024  # entries of a block; two blocks are in memory
_PAGE = 13  # a page of the bit map has 1 kB for 2**13 xids


class SubxactIndex:
    """The subtransactions of one transaction that have changes in its file."""

    __slots__ = ("_before", "_offsets", "_pages", "_xids", "block_size", "blocks", "entries")

    def __init__(self, entries: int = INDEX_ENTRIES) -> None:
        """Create an empty index.

        Args:
            entries: number of entries in one block.
        """
        self.entries = entries
        self.block_size = entries * (4 + 8 + 8)  # bytes in the file
        self.blocks = 0  # blocks in the file
        self._xids, self._offsets, self._before = array("I"), array("Q"), array("Q")
        self._pages: dict[int, bytearray] = {}

    @property
    def size(self) -> int:
        """Bytes of all blocks in the file."""
        return self.blocks * self.block_size

    def __contains__(self, xid: int) -> bool:
        page = self._pages.get(xid >> _PAGE)
        return page is not None and bool(page[(xid >> 3) & 1023] & (1 << (xid & 7)))

    def add(self, xid: int, offset: int, changes: int) -> None:
        """Add `xid`, which has no entry yet. Its first change is at `offset`, after `changes` changes of all xids."""
        page = self._pages.get(xid >> _PAGE)
        if page is None:
            page = self._pages[xid >> _PAGE] = bytearray(1 << (_PAGE - 3))
        page[(xid >> 3) & 1023] |= 1 << (xid & 7)
        self._xids.append(xid)
        self._offsets.append(offset)
        self._before.append(changes)

    def cut(self, xid: int) -> tuple[int, int] | None:
        """Drop the entry of `xid` and all later entries.

        Returns:
            The offset and the number of changes to cut the changes file to. None if the entry is not in memory: all
            entries in memory are dropped then, and the caller calls restore() and cut() again.
        """
        at = self._find(xid)
        before = (self._offsets[at], self._before[at]) if at is not None else None
        start = 0 if at is None else at
        for gone in self._xids[start:]:
            self._pages[gone >> _PAGE][(gone >> 3) & 1023] &= ~(1 << (gone & 7))
        del self._xids[start:], self._offsets[start:], self._before[start:]
        return before

    def _find(self, xid: int) -> int | None:
        for stop in range(len(self._xids), 0, -1024):
            start = max(0, stop - 1024)
            some = self._xids[start:stop]
            if xid in some:
                return start + some.index(xid)
        return None

    def excess(self) -> bytes | None:
        """Return the oldest block, to be written at `size` of the file and confirmed with spilled(), or None."""
        if len(self._xids) < 2 * self.entries:
            return None
        # The bytes are in the machine's order: only this process reads them.
        return b"".join(part[: self.entries].tobytes() for part in (self._xids, self._offsets, self._before))

    def spilled(self) -> None:
        """Drop the block that excess() returned from memory: it is in the file now."""
        entries = self.entries
        del self._xids[:entries], self._offsets[:entries], self._before[:entries]
        self.blocks += 1

    def restore(self, block: bytes) -> None:
        """Load the last block, read at `size - block_size` of the file, after cut() has emptied the memory."""
        start = 0
        for part in (self._xids, self._offsets, self._before):
            stop = start + self.entries * part.itemsize
            part.frombytes(block[start:stop])
            start = stop
        self.blocks -= 1
