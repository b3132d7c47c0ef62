"""Folder of one worker's spool files. Every call here blocks and belongs in a worker thread.

Purpose:
    The files contain rows of the publisher in plain text. The folder belongs to this user with mode 0700, the files
    have mode 0600.

Invariants:
    - The parent folder may be writable for other users, such as /tmp. A symbolic link in place of the folder or of a
      file is refused. Every file is opened relative to a descriptor of the folder, which no other user can replace.
    - Each read or write, of some 256 kB, opens and closes its file. Thousands of in-flight transactions keep no
      descriptor open.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path

from subscriber.errors import SpoolError
from subscriber.sqlstate import INSUFFICIENT_PRIVILEGE

_OURS = re.compile(r"\d+-[0-9a-f]{8}\.(changes|subxacts)")
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC


class SpoolDirectory:
    """An open folder. All methods and the constructor raise OSError unchanged."""

    def __init__(self, path: Path) -> None:
        """Open the folder. It is created, with its parents, if it is missing.

        Raises:
            SpoolError: the folder is a symbolic link, belongs to another user, or is accessible to others.
        """
        self.path = path
        if path.is_symlink():
            raise SpoolError(
                f'spool folder "{path}" is a symbolic link',
                hint="Name the folder itself, or remove the link.",
                sqlstate=INSUFFICIENT_PRIVILEGE,
            )
        missing = list(takewhile(lambda folder: not folder.exists(), (path, *path.parents)))
        for folder in reversed(missing):
            folder.mkdir(0o700, exist_ok=True)
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _SAFE)
        try:
            _check(path, os.fstat(self._fd))
        except BaseException:
            os.close(self._fd)
            raise

    def remove_stale(self) -> None:
        """Remove the spool files of earlier workers. Files with other names are left alone."""
        self.remove(*filter(_OURS.fullmatch, os.listdir(self._fd)))

    def write(self, name: str, data: bytes | bytearray, at: int, *, new: bool) -> None:
        """Write `data` at offset `at` of a file. On an error a part of the data may be in the file.

        Args:
            name: file name without a path.
            data: bytes to write.
            at: offset in bytes.
            new: create the file, which must not exist. Otherwise it must exist.
        """
        flags = os.O_WRONLY | (os.O_CREAT | os.O_EXCL if new else 0)
        with self._open(name, flags) as fd, memoryview(data) as view:
            done = 0
            while done < len(view):
                done += os.pwrite(fd, view[done:], at + done)

    def read(self, name: str, at: int, size: int) -> bytes:
        """Read `size` bytes from offset `at`. Returns fewer bytes at the end of the file."""
        with self._open(name, os.O_RDONLY) as fd:
            data = os.pread(fd, size, at)
            while len(data) < size and (more := os.pread(fd, size - len(data), at + len(data))):
                data += more
        return data

    def truncate(self, name: str, size: int) -> None:
        """Cut a file to `size` bytes."""
        with self._open(name, os.O_WRONLY) as fd:
            os.ftruncate(fd, size)

    def remove(self, *names: str) -> None:
        """Remove files. A missing file is no error."""
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._fd)

    def close_and_remove(self, names: Iterable[str] = ()) -> None:
        """Remove these files and the folder, then close its descriptor. Errors of the removal are ignored."""
        with suppress(OSError):
            self.remove(*names)
            Path(self.path).rmdir()
        os.close(self._fd)

    @contextmanager
    def _open(self, name: str, flags: int) -> Iterator[int]:
        fd = os.open(name, flags | _SAFE, 0o600, dir_fd=self._fd)
        try:
            yield fd
        finally:
            os.close(fd)


def _check(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise SpoolError(
            f'spool folder "{path}" belongs to another user',
            detail=f"It is owned by uid {status.st_uid}; this process runs as uid {os.geteuid()}.",
            hint="Name another folder for the spool, or start as the user who owns it.",
            sqlstate=INSUFFICIENT_PRIVILEGE,
        )
    if status.st_mode & 0o077:
        raise SpoolError(
            f'spool folder "{path}" has invalid permissions',
            detail=f"Others may use it (mode {stat.S_IMODE(status.st_mode):04o}); it should be u=rwx (0700).",
            hint="If nothing else is kept there, chmod 0700 it; else name another folder for the spool.",
            sqlstate=INSUFFICIENT_PRIVILEGE,
        )
