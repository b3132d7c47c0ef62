"""The subtransaction index: where in the changes file each subtransaction of a transaction begins. No I/O.

When a subtransaction aborts, the changes file is cut to its first change. That takes with it exactly what
must go: subtransactions nest, and an abort arrives before anything that was done after it, so whatever lies
behind belongs to the subtransaction or to others inside it.

An entry is 20 bytes: xid, offset of the first change, number of changes before it. They stand in the order of
those first changes, not of xids (a parent often writes first after its child has), so they are searched from the
end. That costs no more than what it drops. Whether an xid is there at all is told by one bit for each, so
that a subtransaction that is new, or that is gone with its parent, is not searched for.

A loop with an exception block makes a subtransaction for every row: all but the last 64 Ki entries go to a
file, in blocks of equal size; the block last written is the one to come back first.

Source: subxact_info_add(), stream_abort_internal() in worker.c.
"""

from __future__ import annotations

from array import array

INDEX_ENTRIES = 32 * 1024  # of a block; two blocks are in memory
_PAGE = 13  # a page of the bit map is for 2**13 xids: 1 kB


class SubxactIndex:
    """The subtransactions of one transaction that have changes in its file."""

    __slots__ = ("_before", "_offsets", "_pages", "_xids", "block_size", "blocks", "entries")

    def __init__(self, entries: int = INDEX_ENTRIES) -> None:
        """`entries`: of one block."""
        self.entries = entries
        self.block_size = entries * (4 + 8 + 8)  # bytes on file
        self.blocks = 0  # that are on file
        self._xids, self._offsets, self._before = array("I"), array("Q"), array("Q")
        self._pages: dict[int, bytearray] = {}

    @property
    def size(self) -> int:
        """Bytes on file."""
        return self.blocks * self.block_size

    def __contains__(self, xid: int) -> bool:
        page = self._pages.get(xid >> _PAGE)
        return page is not None and bool(page[(xid >> 3) & 1023] & (1 << (xid & 7)))

    def add(self, xid: int, offset: int, changes: int) -> None:
        """`xid`, not in here yet, makes its first change at `offset`, with so many changes of anybody before it."""
        page = self._pages.get(xid >> _PAGE)
        if page is None:
            page = self._pages[xid >> _PAGE] = bytearray(1 << (_PAGE - 3))
        page[(xid >> 3) & 1023] |= 1 << (xid & 7)
        self._xids.append(xid)
        self._offsets.append(offset)
        self._before.append(changes)

    def cut(self, xid: int) -> tuple[int, int] | None:
        """Drop the entry of `xid` and all after it; the offset and the number of changes to cut the file to.

        None: it is not among those in memory, which are all dropped: restore() the last block and ask again.
        """
        at = self._find(xid)
        found = (self._offsets[at], self._before[at]) if at is not None else None
        start = 0 if at is None else at
        for gone in self._xids[start:]:
            self._pages[gone >> _PAGE][(gone >> 3) & 1023] &= ~(1 << (gone & 7))
        del self._xids[start:], self._offsets[start:], self._before[start:]
        return found

    def _find(self, xid: int) -> int | None:
        for stop in range(len(self._xids), 0, -1024):
            start = max(0, stop - 1024)
            some = self._xids[start:stop]
            if xid in some:
                return start + some.index(xid)
        return None

    def excess(self) -> bytes | None:
        """The oldest block, to be written at `size` of the file and then given to spilled(); None: all fits."""
        if len(self._xids) < 2 * self.entries:
            return None
        # As the machine has them: nobody but this process reads them.
        return b"".join(part[: self.entries].tobytes() for part in (self._xids, self._offsets, self._before))

    def spilled(self) -> None:
        """The block of excess() is on file."""
        entries = self.entries
        del self._xids[:entries], self._offsets[:entries], self._before[:entries]
        self.blocks += 1

    def restore(self, block: bytes) -> None:
        """Take the last block back, read at `size - block_size` of the file, after cut() has emptied the memory."""
        start = 0
        for part in (self._xids, self._offsets, self._before):
            stop = start + self.entries * part.itemsize
            part.frombytes(block[start:stop])
            start = stop
        self.blocks -= 1
