"""Streamed transactions on disk: the changes of each wait here until it commits, is prepared or aborts.

For every transaction there is a changes file (record_format.py) and, when it has very many subtransactions,
a file with most of the index of where they begin (subxact_index.py). Changes gather in a buffer; the apply worker
has it written when it is full, and at the end of a stream block unless that has left little. So all memory this takes
is one buffer and at most some 90,000 index entries for each transaction under way.

One task writes: it alone calls append, write, pause, rollback and remove, one after another. Others may read
at the same time: a parallel apply worker follows the changes while they come. A rollback may cut the file below
where it reads; every read() that is under way ends then, before it gives anything that was cut off or that came
after the cut. So whoever follows is told of the cut before anything more is written, and reads on from there.

Killed at any moment — a file made and empty, half a record written, the changes cut and their index not yet, some
files of a transaction removed and some not — the files mean nothing: none of what they hold has
been confirmed, the publisher streams those transactions again from their first block, and open() removes
whatever an earlier worker left without looking into it. So nothing is ever flushed to disk here. Each
transaction's files have a random part in their names: a worker that is thought dead and is not can come back
and write, and reaches nothing of its successor's. It finds its files gone and fails.

After an error, or a cancellation while something is written or rolled back, a transaction can only be removed.

Source: STREAMED TRANSACTIONS at the top of worker.c. There is no limit there but temp_file_limit.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import anyio
from anyio import to_thread

from subscriber.errors import ProtocolError, SpoolError, SpoolFull
from subscriber.settings import DEFAULTS
from subscriber.spool.directory import SpoolDirectory
from subscriber.spool.record_format import HEADER, HEADER_SIZE, Record, end, first, split
from subscriber.spool.subxact_index import INDEX_ENTRIES, SubxactIndex
from subscriber.sqlstate import (
    CONFIGURATION_LIMIT_EXCEEDED,
    DISK_FULL,
    DUPLICATE_FILE,
    INSUFFICIENT_PRIVILEGE,
    INSUFFICIENT_RESOURCES,
    UNDEFINED_FILE,
)

_P = ParamSpec("_P")
_T = TypeVar("_T")

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_SQLSTATES = {  # as errcode_for_file_access() has them
    **dict.fromkeys(_FULL, DISK_FULL),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), INSUFFICIENT_PRIVILEGE),
    **dict.fromkeys((errno.ENFILE, errno.EMFILE), INSUFFICIENT_RESOURCES),
    errno.ENOENT: UNDEFINED_FILE,
    errno.EEXIST: DUPLICATE_FILE,
}
_pack = HEADER.pack


class Spool:
    """The streamed transactions of one worker, in a folder of its own.

    `limit` is in bytes over all its files; None: as much as the disk takes.
    """

    def __init__(
        self,
        folder: Path,
        *,
        limit: int | None,
        buffer_size: int = DEFAULTS.spool_buffer_size,
        index_entries: int = INDEX_ENTRIES,
    ) -> None:
        """Create the spool in `folder`.

        Args:
            limit: bytes of all files. None: no limit.
            buffer_size: bytes of a transaction that are written, or read, together.
            index_entries: subtransactions in one block of an index. Two blocks are in memory.
        """
        self.limit = limit
        self.buffer_size = buffer_size
        self.index_entries = index_entries
        self.size = 0  # bytes of all files
        self.transactions: dict[int, SpooledTransaction] = {}  # by xid
        self._path = folder
        self._folder: SpoolDirectory | None = None
        self._replaced: list[SpooledTransaction] = []  # their files are still there

    async def open(self) -> None:
        """Make the folder, with mode 0700, and remove what an earlier worker left in it. Again: begin anew.

        Raises SpoolError when that cannot be, or when the folder is a symbolic link, another user's, or
        open to others.
        """
        await self.close()
        try:
            self._folder = await to_thread.run_sync(SpoolDirectory, self._path)
            await to_thread.run_sync(self._folder.remove_stale)
        except OSError as error:
            raise _explained(error, f'could not prepare spool folder "{self._path}"') from error

    def start(self, xid: int, *, first: bool) -> SpooledTransaction:
        """A stream block of `xid` begins, the first one or a further one.

        Where the first comes again, what was there of that transaction is thrown away.
        Raises ProtocolError for a further block of a transaction that is not here.
        """
        known = self.transactions.get(xid)
        if not first:
            if known is None:
                raise ProtocolError(
                    f"stream block continues transaction {xid}, which has not begun",
                    hint="The worker reconnects; the publisher then streams the transaction from its beginning.",
                )
            return known
        if known is not None:
            known.detach()
            self._replaced.append(known)
        assert self._folder is not None, "the spool is not open"
        self.transactions[xid] = transaction = SpooledTransaction(self, self._folder, xid)
        return transaction

    async def forget_replaced(self) -> None:
        """Remove the files of transactions that began anew."""
        while self._replaced:
            await self._replaced[-1].remove()
            self._replaced.pop()

    async def close(self) -> None:
        """Remove all files and the folder; also while the task is being cancelled, and more than once.

        What cannot be removed is left to the next open().
        """
        folder, self._folder = self._folder, None
        leaving = [*self.transactions.values(), *self._replaced]
        self.transactions.clear()
        self._replaced.clear()
        files = [file for transaction in leaving for file in transaction.detach()]
        if folder is not None:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(folder.close_and_remove, files)


class SpooledTransaction:
    """One streamed transaction: its changes so far, from the first block on."""

    __slots__ = (
        "_buffer",
        "_buffer_size",
        "_changes_file",
        "_counted",
        "_cuts",
        "_folder",
        "_index",
        "_last",
        "_made",
        "_spool",
        "_subxacts_file",
        "changes",
        "started",
        "written",
        "xid",
    )

    def __init__(self, spool: Spool, folder: SpoolDirectory, xid: int) -> None:
        """Spool.start() makes them."""
        self.xid = xid
        self.changes = 0  # records, buffered ones included
        self.written = 0  # bytes that may be read
        self.started = anyio.current_time()
        name = f"{xid}-{secrets.token_hex(4)}"
        self._changes_file, self._subxacts_file = f"{name}.changes", f"{name}.subxacts"
        self._made: set[str] = set()  # of these two; also one whose making has failed
        self._spool = spool
        self._folder = folder
        self._buffer = bytearray()
        self._counted = 0  # bytes of spool.size that are of this transaction
        self._cuts = 0  # how often what a reader sees has been cut, or all of it thrown away
        self._last = xid  # who made the change before
        self._index = SubxactIndex(spool.index_entries)
        self._buffer_size = spool.buffer_size

    @property
    def size(self) -> int:
        """Bytes of the changes, buffered ones included."""
        return self.written + len(self._buffer)

    @property
    def is_full(self) -> bool:
        """Whether write() is due."""
        return len(self._buffer) >= self._buffer_size

    def append(self, xid: int, message: bytes, rest: bytes | memoryview = b"") -> bool:
        """Add a change that (sub)transaction `xid` made; `message` is without the xid it has in a block.

        It may come in two pieces, so that nobody has to put them together. True: the buffer is full and write() is due.
        Called for every change, so it does nothing else.
        """
        if xid != self._last:
            self._enter(xid)
        buffer = self._buffer
        buffer += _pack(len(message) + len(rest), xid)
        buffer += message
        buffer += rest
        self.changes += 1
        return len(buffer) >= self._buffer_size

    def _enter(self, xid: int) -> None:
        if xid != self.xid and xid not in self._index:
            self._index.add(xid, self.size, self.changes)
        self._last = xid

    async def write(self) -> None:
        """Write out what is buffered. Called when append() says so.

        Raises SpoolFull when the spool is over its limit or the disk is full, else SpoolError when it cannot.
        """
        spool = self._spool
        await spool.forget_replaced()
        if not self._buffer:
            return
        if spool.limit is not None and spool.size + len(self._buffer) > spool.limit:
            raise self._over_limit(spool.limit)
        await self._put(self._changes_file, self._buffer, self.written)
        self.written += len(self._buffer)
        self._buffer.clear()
        while block := self._index.excess():
            await self._put(self._subxacts_file, block, self._index.size)
            self._index.spilled()
        self._count(self.written + self._index.size)

    async def end_block(self, *, keep: int = 0) -> None:
        """A stream block ends: write out what is buffered, unless it is less than `keep` bytes.

        With 0 a reader has all of it then. With more, write() is due before anybody reads.
        """
        if len(self._buffer) >= keep:
            await self.write()

    async def _put(self, file: str, data: bytes | bytearray, at: int) -> None:
        new = file not in self._made
        self._made.add(file)
        await self._in_thread("write to", file, self._folder.write, file, data, at, new=new)

    async def rollback(self, subxid: int) -> int | None:
        """A subtransaction aborts: cut the changes to its first one, and return the offset of that.

        None: it has no changes here, or they went with an earlier cut; there is nothing to do.
        Raises SpoolError when the files cannot be cut.
        """
        if subxid not in self._index:
            return None
        while (cut := self._index.cut(subxid)) is None:
            self._index.restore(await self._in_thread("read", self._subxacts_file, self._take_block))
        offset, self.changes = cut
        self._cuts += 1  # not before: a reader that begins while the index is read would not notice
        self._last = self.xid
        if offset >= self.written:
            del self._buffer[offset - self.written :]
        else:
            self._buffer.clear()
            self.written = offset
            file = self._changes_file
            await self._in_thread("truncate", file, self._folder.truncate, file, offset)
        self._count(self.written + self._index.size)
        return offset

    def _count(self, size: int) -> None:
        """The files of this transaction have so many bytes now."""
        self._spool.size += size - self._counted
        self._counted = size

    def _take_block(self) -> bytes:
        folder, file = self._folder, self._subxacts_file
        at = self._index.size - self._index.block_size
        block = folder.read(file, at, self._index.block_size)
        if len(block) < self._index.block_size:
            raise self._damaged(file, at)
        folder.truncate(file, at)
        return block

    def read(self, offset: int = 0) -> AsyncIterator[list[Record]]:
        """The written records from `offset` on, where one begins, whole and in chunks of about `buffer_size` bytes.

        Ends when it has read all that is written by then, and at the first rollback after this call that cuts anything
        off. Raises SpoolError when the file cannot be read, or is not as it was written.
        """
        return self._read(offset, self._cuts)

    async def _read(self, offset: int, cuts: int) -> AsyncIterator[list[Record]]:
        file = self._changes_file
        while self._cuts == cuts and offset < self.written:
            try:
                records = await self._in_thread("read", file, self._read_records, offset, self.written)
            except SpoolError:
                if self._cuts == cuts:
                    raise
                return
            if self._cuts != cuts:  # while the thread read: who knows what it saw
                return
            if not records:
                raise self._damaged(file, offset)
            offset = end(records[-1])
            yield records

    def _read_records(self, offset: int, until: int) -> list[Record]:
        folder, file = self._folder, self._changes_file
        data = folder.read(file, offset, min(self._buffer_size, until - offset))
        length, xid = first(data)
        if HEADER_SIZE <= len(data) < HEADER_SIZE + length <= until - offset:  # large: not cut out of what was read
            message = folder.read(file, offset + HEADER_SIZE, length)
            return [(offset, xid, message)] if len(message) == length else []
        return split(data, offset)

    async def remove(self) -> None:
        """The transaction has ended: remove its files. Raises SpoolError when they cannot be."""
        if files := self.detach():
            await self._in_thread("remove", self._changes_file, self._folder.remove, *files)
        if self._spool.transactions.get(self.xid) is self:
            del self._spool.transactions[self.xid]

    def detach(self) -> set[str]:
        """Have every reader end, and do not count the files any more: they are returned, to be removed."""
        self._cuts += 1
        self._count(0)
        return self._made

    async def _in_thread(
        self, verb: str, file: str, call: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Call a method that blocks where it may, and say what `verb` and `file` it was about when it fails."""
        try:
            return await to_thread.run_sync(partial(call, *args, **kwargs))
        except OSError as error:
            path = self._folder.path / file
            detail = f"Transaction {self.xid} has {self.changes} changes in {self.size} bytes so far."
            raise _explained(error, f'could not {verb} file "{path}"', detail) from error

    def _over_limit(self, limit: int) -> SpoolFull:
        return SpoolFull(
            f"streamed transactions exceed the spool's limit of {limit} bytes",
            detail=f"The spool has {self._spool.size} bytes of {len(self._spool.transactions)} transactions; "
            f"transaction {self.xid} has {self.changes} changes in {self.size} bytes so far.",
            hint="Raise the limit, or have the publisher keep large transactions until they commit: "
            "ALTER SUBSCRIPTION … SET (streaming = off).",
            sqlstate=CONFIGURATION_LIMIT_EXCEEDED,
        )

    def _damaged(self, file: str, offset: int) -> SpoolError:
        return SpoolError(
            f'spool file "{self._folder.path / file}" has no whole record at offset {offset}',
            detail=f"{self.written} bytes of transaction {self.xid} were written to it.",
            hint="Something else has changed it, or the disk fails.",
        )


def _explained(error: OSError, what: str, detail: str | None = None) -> SpoolError:
    """Our error for the system's, with PostgreSQL's SQLSTATE for it."""
    kind, hint = SpoolError, None
    if error.errno in _FULL:
        kind = SpoolFull
        hint = (
            "Make room on that disk, or have the publisher keep large transactions until they commit: "
            "ALTER SUBSCRIPTION … SET (streaming = off)."
        )
    elif error.errno == errno.ENOENT:
        hint = "Something else removed it; keep cleaners of temporary files away from the spool's folder."
    sqlstate = _SQLSTATES.get(error.errno or 0)
    return kind(f"{what}: {error.strerror}", detail=detail, hint=hint, sqlstate=sqlstate)
