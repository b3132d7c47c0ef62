"""Where a change log and a lake are stored: a directory, or a prefix of an object store, and what both can do.

A `Location` is a path of either kind. `pathlib.Path` and `ObjectPath` have the operations that readers need in common:
`/`, `name`, exists(), read_bytes(), iterdir() and unlink(). The functions of this module are the other operations, with
their guarantees:

    operation        directory                         object store (objects.py)
    write_file()     file synced and renamed           one PUT
    claim_file()     the same                          one PUT with If-None-Match
    append_line()    appended and synced               read, and PUT with If-Match
    remove_file()    removed and synced                one DELETE
    stored_file()    written, then renamed             written to a temporary file, then a multipart upload
    local_file()     the file itself                   a temporary copy
    open_file()      descriptor                        ranges, read ahead
    lock()           flock(), ends with the process    lease, ends some seconds after the process (leases.py)
    lock_attempt()   to be repeated until the lock is free; does not wait itself

All block. An error of the storage is an OSError, in both kinds, and so is a missing file (FileNotFoundError).

Another user may be able to create files in a directory. So no file is written through a symbolic link, and no pipe is
opened: it would wait for its other end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar
from uuid import uuid4

from subscriber.changelog.leases import Lease, LeaseAttempt
from subscriber.changelog.objects import ObjectFile, ObjectPath, download, prefixes, upload
from subscriber.errors import StatementError
from subscriber.sqlstate import FEATURE_NOT_SUPPORTED, INSUFFICIENT_PRIVILEGE, IO_ERROR

Location: TypeAlias = Path | ObjectPath

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)")  # also of a URL that has been a Path
_FILE = "file"
REQUESTS = 16  # to an object store at the same time
SCHEMES = ("s3", "gs", "abfss", "abfs", "az")


def location(path: Location | str) -> Location:
    """Return the location with this path or URL.

    Raises:
        StatementError: storage of this kind is not supported, or the URL has a password or no bucket.
    """
    if isinstance(path, ObjectPath):
        return path
    match = _URL.match(str(path))
    if match is None:
        return Path(path)
    scheme, rest = match[1].lower(), match[2]
    if scheme == _FILE:
        return Path(f"/{rest}")
    if scheme not in SCHEMES:
        raise StatementError(
            f'"{path}" is not a directory',
            detail=f"Storage by {scheme}: is not supported.",
            hint=f"Give a path, or the URL of an object store: {', '.join(f'{name}://' for name in SCHEMES)}.",
            sqlstate=FEATURE_NOT_SUPPORTED,
        )
    return ObjectPath.from_url(f"{scheme}://{rest}")


class OpenFile(Protocol):
    """A file that is open for reading."""

    def read(self, size: int, offset: int) -> bytes:
        """Return `size` bytes from `offset` on, or fewer at the end of the file."""

    def size(self) -> int:
        """Return the size in bytes."""

    def close(self) -> None:
        """Close the file."""


class _LocalFile:
    def __init__(self, path: Path) -> None:
        self._fd = open_regular(path, os.O_RDONLY)

    def read(self, size: int, offset: int) -> bytes:
        data = os.pread(self._fd, size, offset)
        while len(data) < size and (more := os.pread(self._fd, size - len(data), offset + len(data))):
            data += more
        return data

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        os.close(self._fd)


def open_file(path: Location) -> OpenFile:
    """Open a file for reading."""
    return ObjectFile(path) if isinstance(path, ObjectPath) else _LocalFile(path)


def file_size(path: Location) -> int:
    """Return the size of a file in bytes."""
    return path.size() if isinstance(path, ObjectPath) else path.stat().st_size


def make_directory(path: Location) -> None:
    """Create a directory and its parents. Object stores have none."""
    if isinstance(path, Path):
        path.mkdir(parents=True, exist_ok=True, mode=0o750)


def make_private_directory(path: Location) -> None:
    """Create a directory of rows, which other users must not read, and its parents. They are synced."""
    if not isinstance(path, Path):
        return
    missing = list(takewhile(lambda folder: not folder.exists(), (path, *path.parents)))
    if missing:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in missing:
        sync_directory(folder.parent)


def storage_sqlstate(error: OSError) -> str:
    """Return the SQLSTATE of an error of the storage."""
    return INSUFFICIENT_PRIVILEGE if error.errno in (errno.EACCES, errno.EPERM) else IO_ERROR


def open_regular(path: Path, flags: int, mode: int = 0o640) -> int:
    """Return the descriptor of a regular file. Raises OSError for others, and for a link if it is to be written."""
    if flags & (os.O_WRONLY | os.O_RDWR):
        flags |= os.O_NOFOLLOW
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return fd


def create_file(path: Path, mode: int = 0o640) -> int:
    """Return the descriptor of a new file for writing. A file with the name, of a killed process, is removed."""
    path.unlink(missing_ok=True)
    return open_regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)


def read_file(path: Location) -> bytes:
    """Return the contents of a file."""
    if isinstance(path, ObjectPath):
        return path.read_bytes()
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        return file.read()


def write_file(path: Location, data: bytes) -> None:
    """Write a whole file atomically: after a crash it has either its old contents or these."""
    if isinstance(path, ObjectPath):
        path.put(data)
        return
    temporary = path.with_name(f"{path.name}.tmp")
    with os.fdopen(create_file(temporary, 0o666), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_directory(path.parent)


def claim_file(path: Location, data: bytes) -> None:
    """Write a file that only the holder of a lock writes. In a directory, the lock excludes all others.

    Raises:
        FileExistsError: in an object store, the file has other contents: another process has the lease now.
    """
    if isinstance(path, ObjectPath):
        path.create(data)
    else:
        write_file(path, data)


def remove_file(path: Location) -> None:
    """Remove a file. After a crash, it is not there again."""
    path.unlink()
    if isinstance(path, Path):
        sync_directory(path.parent)


def append_line(path: Location, data: bytes) -> None:
    """Add lines to the end of a file, which is created if it does not exist. Call cut_unfinished_line() before."""
    if isinstance(path, ObjectPath):
        path.append(data)
        return
    is_new = not path.exists()
    fd = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    if is_new:
        sync_directory(path.parent)


def cut_unfinished_line(path: Path) -> None:
    """Cut off a last line that a killed writer did not finish. An object store has no unfinished lines."""
    try:
        fd = open_regular(path, os.O_RDWR)
    except FileNotFoundError:
        return
    with os.fdopen(fd, "r+b") as file:
        data = file.read()
        if data and not data.endswith(b"\n"):
            os.ftruncate(fd, data.rfind(b"\n") + 1)


def whole_lines(path: Location) -> list[bytes]:
    """Return the lines of a file that append_line() has finished. Empty if there is no file."""
    try:
        *lines, _ = read_file(path).split(b"\n")  # after the last newline: nothing, or an unfinished line
    except FileNotFoundError:
        return []
    return lines


@contextlib.contextmanager
def stored_file(path: Location) -> Iterator[Path]:
    """Yield the path of a local file, which is stored as `path` when the block ends without an error.

    For a library that writes local files. The file is not synced.
    """
    if isinstance(path, Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{uuid4().hex}")
        try:
            yield temporary
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
        return
    with tempfile.TemporaryDirectory(prefix="subscriber-") as directory:
        local = Path(directory) / path.name
        yield local
        upload(local, path)


@contextlib.contextmanager
def local_file(path: Location) -> Iterator[Path]:
    """Yield the path of a local file with the contents of `path`, for a library that reads local files."""
    if isinstance(path, Path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="subscriber-") as directory:
        local = Path(directory) / path.name
        download(path, local)
        yield local


def file_names(directory: Location) -> list[str]:
    """Return the names of the files directly in a directory. Empty if there is no directory."""
    try:
        return [path.name for path in directory.iterdir()]
    except FileNotFoundError:
        return []


def directory_names(directory: Location) -> list[str]:
    """Return the names of the directories directly in a directory. Empty if there is no directory."""
    if isinstance(directory, ObjectPath):
        return prefixes(directory)
    return [path.name for path in directory.iterdir() if path.is_dir()] if directory.exists() else []


def modified_times(directory: Location) -> dict[str, float]:
    """Return when each file directly in a directory was modified, in seconds since 1970, by its name.

    Empty if there is no directory.
    """
    if isinstance(directory, ObjectPath):
        return {
            stored.path.name: stored.modified
            for stored in directory.objects()
            if stored.path == directory / stored.path.name
        }
    return {path.name: path.stat().st_mtime for path in directory.iterdir()} if directory.exists() else {}


Item = TypeVar("Item")
Result = TypeVar("Result")


def for_each(directory: Location, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return function(item) for each of the items, in order. Calls run at the same time for an object store."""
    if isinstance(directory, Path) or len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(REQUESTS, len(items))) as pool:
        return list(pool.map(function, items))


def remove_directory(path: Location) -> None:
    """Remove a directory with its files, if it exists."""
    if isinstance(path, ObjectPath):
        path.remove_all()
    else:
        shutil.rmtree(path, ignore_errors=True)


def sync_directory(directory: Path) -> None:
    """Sync a directory, so that files created, renamed or removed in it survive a crash."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Lock(Protocol):
    """A lock that lock() has taken."""

    def check(self) -> None:
        """Raise OSError if the lock has been lost."""

    def release(self) -> None:
        """Release the lock."""


class LockAttempt(Protocol):
    """An attempt to take a lock, which continues until it is taken."""

    def take(self) -> Lock | None:
        """Take the lock. None: another process has it. Does not wait for that process. Raises OSError."""

    def describe(self) -> str:
        """Return what is known of the process that has the lock, as a sentence. Call it after take()."""


class _FileLock:
    """A lock of the kernel. The file has the id of the process that took it last."""

    def __init__(self, path: Path) -> None:
        self._fd = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(self._fd)
            raise
        with contextlib.suppress(OSError):  # a full disk is no reason not to have the lock
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, b"%d\n" % os.getpid(), 0)

    def check(self) -> None:
        """A lock of the kernel is held as long as the descriptor is open."""

    def release(self) -> None:
        os.close(self._fd)


class _FileLockAttempt:
    def __init__(self, path: Path) -> None:
        self._path = path

    def take(self) -> Lock | None:
        with contextlib.suppress(BlockingIOError):
            return _FileLock(self._path)
        return None

    def describe(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            return f"Process {int(read_file(self._path))} has the lock."
        return "A process has the lock."


def lock_attempt(path: Location) -> LockAttempt:
    """Return an attempt to take the lock of a file, which is created if it does not exist."""
    return LeaseAttempt(path) if isinstance(path, ObjectPath) else _FileLockAttempt(path)


def lock(path: Location) -> Lock:
    """Take the lock of a file, which is created if it does not exist. Raises BlockingIOError if a process has it."""
    return Lease.acquire(path) if isinstance(path, ObjectPath) else _FileLock(path)


@contextlib.contextmanager
def locked(path: Location) -> Iterator[Lock]:
    """Have a lock during the block. Errors are those of lock()."""
    taken = lock(path)
    try:
        yield taken
    finally:
        taken.release()
