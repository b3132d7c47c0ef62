"""Lease: the right to write below a path of an object store, in place of a lock.

    lease    a JSON object: the owner, and how often it has renewed the lease

**Purpose.** Two processes must not write the same log. An object store has no locks that end with a process, and the
clocks of two machines differ. So the holder changes the object every RENEWAL seconds, and another process may take the
lease only after it has seen the same object for DURATION seconds by its own clock. The clock counts the time in which
the machine is suspended.

**Invariants.**

- Each change of the object is conditional on its version. So the store decides which of two processes has the lease.
- A holder that has not renewed the lease for DURATION - MARGIN seconds by its own clock has lost it: check() fails.
- A process that is stopped between check() and a write can still write later. So all writes of a log that could do harm
  then are conditional themselves: segments are created, and "durable" is replaced only if it is still the same
  (object_segments.py). The commits of Delta tables are conditional, too.

**Failure cases.**

- Killed: the lease ends after DURATION seconds.
- Store not reachable for the holder: it stops to write before another process can begin.
- Store not reachable for a process that waits: it has seen no change in the meantime, and the holder cannot have made
  one that it will not see.
- Two processes take a free lease at once: the store accepts one of the requests.
"""

from __future__ import annotations

import contextlib
import errno
import json
import threading
import time
from functools import partial
from uuid import uuid4

from subscriber.changelog.objects import ObjectPath, Version
from subscriber.errors import StatementError
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE

DURATION = 15.0  # seconds
RENEWAL = 4.0
MARGIN = 3.0
_POLL = 1.0
# Unlike the monotonic clock of Linux, it does not stop while the machine is suspended.
_now = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Lease:
    """A lease that this process has. A thread renews it until release()."""

    def __init__(self, path: ObjectPath, owner: str, version: Version, taken: float) -> None:
        """Create the lease; acquire() is the way to get one."""
        self._path = path
        self._owner = owner
        self._version = version
        self._renewed = taken  # when the last renewal began
        self._count = 0
        self._ended = threading.Event()
        self._lost = ""
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls, path: ObjectPath) -> Lease:
        """Take the lease. Waits up to DURATION seconds for the end of one that is not renewed.

        Raises:
            BlockingIOError: another process has it.
            StatementError: the object is not a lease.
            OSError: the store cannot be read or written.
        """
        attempt = LeaseAttempt(path)
        while (lease := attempt.take()) is None:
            if attempt.is_renewed:
                raise BlockingIOError(errno.EWOULDBLOCK, "another process has the lease", str(path))
            time.sleep(_POLL)
        return lease

    def _renew(self) -> None:
        while not self._ended.wait(RENEWAL):
            began = _now()
            self._count += 1
            try:
                self._version = self._path.replace(_content(self._owner, self._count), self._version)
                self._renewed = began
            except FileExistsError:
                self._lost = "another process has taken it"
                return
            except OSError as error:
                self._lost = f"it could not be renewed: {error.strerror}"

    def check(self) -> None:
        """Raise OSError if the lease may have ended."""
        if _now() - self._renewed > DURATION - MARGIN or (self._lost and not self._thread.is_alive()):
            raise OSError(errno.ESTALE, f"the lease has ended: {self._lost or 'it was not renewed'}", str(self._path))

    def release(self) -> None:
        """End the lease, so that another process can take it at once. Does nothing if the store cannot be reached."""
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            self._path.replace(_content(None, self._count), self._version)


class LeaseAttempt:
    """Looks at a lease again and again until it can be taken.

    Attributes:
        is_renewed: another process has changed the lease since the first look.
    """

    def __init__(self, path: ObjectPath) -> None:
        """Create the attempt; take() is the first look."""
        self._path = path
        self._seen: Version | None = None  # None: take() has not been called
        self._since = 0.0  # when `_seen` was seen first
        self.is_renewed = False

    def take(self) -> Lease | None:
        """Take the lease if it is free, or was not renewed for DURATION seconds. None: another process has it.

        Raises:
            StatementError: the object is not a lease.
            OSError: the store cannot be read or written.
        """
        began = _now()
        try:
            data, version = self._path.read()
        except FileNotFoundError:
            data, version = b"", None
        is_free = not data or _owner(self._path, data) is None
        if is_free or (version == self._seen and began - self._since >= DURATION):
            owner = uuid4().hex
            content = _content(owner, 0)
            try:
                taken = self._path.create(content) if version is None else self._path.replace(content, version)
            except FileExistsError:
                self.is_renewed = True
                return None
            return Lease(self._path, owner, taken, began)
        if version != self._seen:
            self.is_renewed = self._seen is not None
            self._seen, self._since = version, _now()
        return None

    def describe(self) -> str:
        """Return what the last look has shown."""
        return f"Its lease was not renewed for {_now() - self._since:.0f} s; it ends at {DURATION:.0f} s."


def _owner(path: ObjectPath, data: bytes) -> str | None:
    """Return the owner in the contents of a lease. None: it has been released."""
    try:
        owner = json.loads(data)["owner"]
        if owner is None or isinstance(owner, str):
            return owner
    except (ValueError, KeyError, TypeError):
        pass
    raise StatementError(
        f'"{path}" is not a lease',
        detail="Another program has written the object.",
        hint=f"Make sure that no process writes below the path, then remove the object: `aws s3 rm {path}`."
        if path.root.startswith("s3:")
        else "Make sure that no process writes below the path, then remove the object.",
        sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
    )


def _content(owner: str | None, count: int) -> bytes:
    return json.dumps({"owner": owner, "renewals": count}).encode()
