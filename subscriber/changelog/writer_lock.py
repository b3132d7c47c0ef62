"""WriterLock: keeps all writers but one away from a change log, by a lock or a lease.

A process that waits as a standby calls attempt() again and again. The writer uses the lock that it then has.
"""

from __future__ import annotations

import stat
from pathlib import Path

from subscriber.changelog.directory_use import DirectoryUse, check_use
from subscriber.changelog.storage import Location, Lock, lock, lock_attempt, make_private_directory, storage_sqlstate
from subscriber.display import shell_word
from subscriber.errors import ChangeLogError
from subscriber.remedy import Remedy
from subscriber.sqlstate import INSUFFICIENT_PRIVILEGE, OBJECT_IN_USE


def other_writer(log: Location) -> ChangeLogError:
    """Return the error for a log that another process writes."""
    return ChangeLogError(
        f'another process writes the change log in "{log}"',
        hint="Stop the other `subscriber archive`, or use another directory. With --standby, this one waits and takes "
        "over when the other one ends.",
        sqlstate=OBJECT_IN_USE,
    )


def lease_lost(log: Location, reason: str | None) -> ChangeLogError:
    """Return the error for a writer whose lease has ended."""
    return ChangeLogError(
        f'the lease of the change log in "{log}" was lost',
        detail=f"Another process may write the log now: {reason}.",
        hint="`subscriber archive` tries to take the lease again. Check that this machine reaches the store.",
        sqlstate=OBJECT_IN_USE,
    )


class WriterLock:
    """The lock of one log for this process. Methods block; check() may be called from any thread."""

    def __init__(self, log: Location, name: str) -> None:
        """Create the lock. `name` is the name of its file in the directory `log`."""
        self._log = log
        self._path = log / name
        self._attempt = lock_attempt(self._path)
        self._lock: Lock | None = None
        self._is_checked = False

    @property
    def is_held(self) -> bool:
        """Return True from acquire() or attempt() to release(). A lease may have ended since: check() finds out."""
        return self._lock is not None

    def acquire(self) -> None:
        """Take the lock, unless this process has it. A directory is created if it does not exist.

        Raises:
            StatementError: the directory has another use.
            ChangeLogError: another process writes the log.
            OSError: a system call or a request has failed.
        """
        if self._lock is None:
            self._make_directory()
            try:
                self._lock = lock(self._path)
            except BlockingIOError:
                raise other_writer(self._log) from None

    def attempt(self) -> bool:
        """Take the lock if no other process has it. Does not wait. Returns True if this process has it now.

        Raises:
            StatementError: the directory has another use.
            ChangeLogError: a system call or a request has failed.
        """
        if self._lock is None:
            try:
                self._make_directory()
                self._lock = self._attempt.take()
            except OSError as error:
                raise ChangeLogError(
                    f'could not lock the change log in "{self._log}": {error.strerror}',
                    hint="Correct what the system or the store refuses. A writer that runs tries again.",
                    sqlstate=storage_sqlstate(error),
                ) from error
        return self._lock is not None

    def describe_holder(self) -> str:
        """Return what is known of the process that has the lock, after attempt() has returned False."""
        return self._attempt.describe()

    def check(self) -> None:
        """Raise OSError if another process may have taken the lock."""
        if (held := self._lock) is not None:
            held.check()

    def release(self) -> None:
        """Release the lock, if this process has it."""
        held, self._lock = self._lock, None
        self._attempt = lock_attempt(self._path)  # what an earlier one has seen of a lease is old
        if held is not None:
            held.release()

    def _make_directory(self) -> None:
        if not self._is_checked:
            check_use(self._log, DirectoryUse.CHANGE_LOG)
            self._is_checked = True
        make_private_directory(self._log)
        if isinstance(self._log, Path) and self._log.stat().st_mode & stat.S_IWOTH:
            raise ChangeLogError(
                f'everybody may write in the directory of the change log, "{self._log}"',
                detail="Any user of this machine could replace a segment by another one.",
                hint=Remedy(command=f"chmod o-w {shell_word(str(self._log))}"),
                sqlstate=INSUFFICIENT_PRIVILEGE,
            )
