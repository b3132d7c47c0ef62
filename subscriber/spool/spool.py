"""Spool of streamed transactions: the changes of each are on disk until it commits, is prepared or aborts.

Purpose:
    A changes file (record_format.py) holds the changes of one transaction. A transaction with very many
    subtransactions has a second file with most of their index (subxact_index.py). Changes are appended to a buffer.
    The apply worker writes the buffer when it is full, and at the end of a stream block unless little is in it.
    Memory is bounded: one buffer and at most some 90,000 index entries for each in-flight transaction.

Invariants:
    - One task calls append(), write(), end_block(), rollback() and remove(), one after another.
    - Other tasks may read at the same time: a parallel apply worker follows the changes as they arrive.
    - A rollback may cut the file below the position of a reader. Every active read() then ends, and never yields a
      record that was cut off or one that was written after the cut. The writer informs the reader of the cut before
      it writes more, and the reader continues from the cut.
    - No file is ever flushed with fsync(): none of its changes has been confirmed to the publisher.
    - The file names of a transaction have a random part. A worker that was presumed dead may resume and write, but it
      cannot reach the files of its successor; its own files are missing, so it fails.

Failure cases:
    - Worker killed after it created a file, within a record, between cutting the changes and cutting their index, or
      between removing two files: open() removes all files of an earlier worker without reading them, and the
      publisher streams those transactions again from their first block.
    - Error or cancellation during write() or rollback(): the transaction can only be removed.

Source:
    STREAMED TRANSACTIONS at the top of worker.c, whose only limit is temp_file_limit.
"""

from __future__ import annotations

import errno
import os
import secrets
import tempfile
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
_SQLSTATES = {  # the same choice as errcode_for_file_access()
    **dict.fromkeys(_FULL, DISK_FULL),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), INSUFFICIENT_PRIVILEGE),
    **dict.fromkeys((errno.ENFILE, errno.EMFILE), INSUFFICIENT_RESOURCES),
    errno.ENOENT: UNDEFINED_FILE,
    errno.EEXIST: DUPLICATE_FILE,
}
_pack = HEADER.pack


def default_spool_root() -> Path:
    """Return a directory for large temporary files: TMPDIR, or /var/tmp, because /tmp may be in memory."""
    if "TMPDIR" not in os.environ and os.access("/var/tmp", os.W_OK | os.X_OK):
        return Path("/var/tmp")
    return Path(tempfile.gettempdir())


class Spool:
    """The streamed transactions of one worker, in a folder of its own.

    `limit` is the maximum size of all files in bytes. None: no limit but the disk's.
    """

    def __init__(
        self,
        folder: Path,
        *,
        limit: int | None,
        buffer_size: int = DEFAULTS.spool_buffer_size,
        index_entries: int = INDEX_ENTRIES,
    ) -> None:
        """Create the spool in `folder`. open() creates the folder.

        Args:
            folder: path of the folder; its parents are created if they are missing.
            limit: maximum size of all files, in bytes. None: no limit.
            buffer_size: bytes of a transaction that are written, or read, in one piece.
            index_entries: subtransactions in one block of an index. Two blocks are in memory.
        """
        self.limit = limit
        self.buffer_size = buffer_size
        self.index_entries = index_entries
        self.size = 0  # bytes of all files
        self.transactions: dict[int, SpooledTransaction] = {}  # by xid
        self._path = folder
        self._folder: SpoolDirectory | None = None
        self._replaced: list[SpooledTransaction] = []  # their files still exist

    async def open(self) -> None:
        """Create the folder with mode 0700 and remove the files of an earlier worker. A second call starts over.

        Raises:
            SpoolError: the folder cannot be created or emptied, is a symbolic link, belongs to another user, or is
                accessible to others.
        """
        await self.close()
        try:
            self._folder = await to_thread.run_sync(SpoolDirectory, self._path)
            await to_thread.run_sync(self._folder.remove_stale)
        except OSError as error:
            raise _explained(error, f'could not prepare spool folder "{self._path}"') from error

    def start(self, xid: int, *, first: bool) -> SpooledTransaction:
        """Return the transaction whose stream block begins.

        A second first block of a transaction replaces it and discards the changes of the earlier one.

        Args:
            xid: transaction ID of the top-level transaction.
            first: True for the first block of the transaction.

        Raises:
            ProtocolError: the block continues a transaction that is not in the spool.
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
        """Remove the files of transactions that were replaced by a second first block."""
        while self._replaced:
            await self._replaced[-1].remove()
            self._replaced.pop()

    async def close(self) -> None:
        """Remove all files and the folder. Idempotent.

        Files that cannot be removed are left to the next open().

        Cancellation: shielded.
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
    """The changes of one streamed transaction, from its first block on. Created by Spool.start()."""

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
        """Create a transaction without changes and without files."""
        self.xid = xid
        self.changes = 0  # records, including buffered ones
        self.written = 0  # bytes in the file, which read() may return
        self.started = anyio.current_time()
        name = f"{xid}-{secrets.token_hex(4)}"
        self._changes_file, self._subxacts_file = f"{name}.changes", f"{name}.subxacts"
        self._made: set[str] = set()  # names of files that exist, or whose creation failed
        self._spool = spool
        self._folder = folder
        self._buffer = bytearray()
        self._counted = 0  # bytes of this transaction in spool.size
        self._cuts = 0  # number of rollbacks and detach() calls; a reader compares it
        self._last = xid  # subtransaction of the previous change
        self._index = SubxactIndex(spool.index_entries)
        self._buffer_size = spool.buffer_size

    @property
    def size(self) -> int:
        """Bytes of the changes, including buffered ones."""
        return self.written + len(self._buffer)

    @property
    def is_full(self) -> bool:
        """True if write() is due."""
        return len(self._buffer) >= self._buffer_size

    def append(self, xid: int, message: bytes, rest: bytes | memoryview = b"") -> bool:
        """Append a change to the buffer. Called for every change, so it does nothing else.

        Args:
            xid: transaction ID of the (sub)transaction that made the change.
            message: the message without the xid that it has inside a stream block, or the first part of it.
            rest: the second part of the message, so that callers do not concatenate the two.

        Returns:
            True if the buffer is full and write() is due.
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
        """Write the buffer to the file. Due when append() returns True.

        Raises:
            SpoolFull: the spool exceeds its limit or the disk is full.
            SpoolError: the file cannot be written.
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
        """Write the buffer at the end of a stream block, unless it has less than `keep` bytes.

        With 0 a reader finds all changes in the file. With more, write() is due before anything is read.
        """
        if len(self._buffer) >= keep:
            await self.write()

    async def _put(self, file: str, data: bytes | bytearray, at: int) -> None:
        new = file not in self._made
        self._made.add(file)
        await self._in_thread("write to", file, self._folder.write, file, data, at, new=new)

    async def rollback(self, subxid: int) -> int | None:
        """Cut the changes of an aborted subtransaction and everything after them.

        Returns:
            The offset of its first change, where the file ends now. None if it has no changes here, or an earlier cut
            removed them.

        Raises:
            SpoolError: the files cannot be cut.
        """
        if subxid not in self._index:
            return None
        while (cut := self._index.cut(subxid)) is None:
            self._index.restore(await self._in_thread("read", self._subxacts_file, self._take_block))
        offset, self.changes = cut
        self._cuts += 1  # Not earlier: a reader that starts while the index is being read would miss the cut.
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
        """Set the number of bytes that the files of this transaction have."""
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
        """Read the written records from `offset` on, in chunks of whole records of about `buffer_size` bytes.

        Ends after all records that are written by then, and at the first rollback after this call that cuts anything.

        Args:
            offset: bytes from the start of the file; a record must begin there.

        Raises:
            SpoolError: the file cannot be read, or is damaged.
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
            if self._cuts != cuts:  # The file was cut while the thread read, so the records may be torn.
                return
            if not records:
                raise self._damaged(file, offset)
            offset = end(records[-1])
            yield records

    def _read_records(self, offset: int, until: int) -> list[Record]:
        folder, file = self._folder, self._changes_file
        data = folder.read(file, offset, min(self._buffer_size, until - offset))
        length, xid = first(data)
        if HEADER_SIZE <= len(data) < HEADER_SIZE + length <= until - offset:  # larger than a chunk: read it directly
            message = folder.read(file, offset + HEADER_SIZE, length)
            return [(offset, xid, message)] if len(message) == length else []
        return split(data, offset)

    async def remove(self) -> None:
        """Remove the files of the transaction, which has ended.

        Raises:
            SpoolError: a file cannot be removed.
        """
        if files := self.detach():
            await self._in_thread("remove", self._changes_file, self._folder.remove, *files)
        if self._spool.transactions.get(self.xid) is self:
            del self._spool.transactions[self.xid]

    def detach(self) -> set[str]:
        """End every active read() and stop counting the files. Returns the names of the files to remove."""
        self._cuts += 1
        self._count(0)
        return self._made

    async def _in_thread(
        self, verb: str, file: str, call: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Run a blocking call in a thread. Its error names the operation, `verb`, and `file`."""
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
    """Convert an OSError to a SpoolError with the SQLSTATE that PostgreSQL gives it."""
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
