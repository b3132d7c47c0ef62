"""Objects of an object store, as paths: s3://bucket/prefix, gs://…, abfss://….

The library obstore knows the stores. It takes the endpoint and the credentials from the environment of the process
(AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, GOOGLE_SERVICE_ACCOUNT, …) or from the role of the machine. So a path has no
password, and a path that is sent to an executor is opened with the credentials of the executor.

**Conditional puts.** create() and replace() let the store decide which of two writers was first. An answer can be lost
after the store has acted. The repeated request then fails on its own effect, so both compare the contents.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from subscriber.errors import StatementError
from subscriber.sqlstate import FEATURE_NOT_SUPPORTED, INVALID_PARAMETER_VALUE

if TYPE_CHECKING:
    from obstore.store import ObjectStore

TIMEOUT = timedelta(seconds=60)  # of one request
RETRY = timedelta(seconds=60)  # a request that fails is repeated for this time
FIRST_READ = 64 * 1024  # bytes of the first range of a file; each range that follows has twice as many
LARGEST_READ = 8 * 1024 * 1024  # bytes of a range

_REFUSED = ("PermissionDeniedError", "UnauthenticatedError")
_VARIABLES = {"s3": "AWS", "gs": "GOOGLE"}  # how the names of environment variables begin; those of Azure otherwise


@lru_cache
def _store(root: str) -> ObjectStore:
    """Return the client for a bucket. One for each process: it is not sent to other processes."""
    try:
        from obstore.store import from_url
    except ImportError:
        raise StatementError(
            f"{root} needs the package obstore",
            hint="Install it on this machine and on the executors: `pip install 'pgsubscriber[object-storage]'`.",
            sqlstate=FEATURE_NOT_SUPPORTED,
        ) from None
    # Options in a call replace those of the environment.
    variable = f"{_VARIABLES.get(urlsplit(root).scheme, 'AZURE')}_ALLOW_HTTP"
    allow_http = os.environ.get(variable, "").lower() in ("true", "1")
    store: ObjectStore = from_url(
        root,
        client_options={"timeout": TIMEOUT, "allow_http": allow_http},
        retry_config={"retry_timeout": RETRY},
    )
    return store


@contextmanager
def _storing(path: ObjectPath) -> Iterator[None]:
    """Turn the library's errors into OSErrors."""
    from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

    try:
        yield
    except (FileNotFoundError, FileExistsError, AlreadyExistsError, PreconditionError):
        raise  # create() and replace() handle the last two
    except BaseError as error:
        # The first lines have the request and the answer; the others are of the library.
        text = " ".join(str(error).split("\n\nDebug source")[0].split())
        code = errno.EACCES if type(error).__name__ in _REFUSED else errno.EIO
        raise OSError(code, text, str(path)) from None


class Version(NamedTuple):
    """Distinguishes the contents of an object from earlier and later ones, by the field that the store supports."""

    e_tag: str | None
    version: str | None

    @classmethod
    def of(cls, found: Any) -> Version:
        """Return the version in an answer of the library."""
        return cls(found["e_tag"], found["version"])


class StoredObject(NamedTuple):
    """An object in a listing."""

    path: ObjectPath
    size: int
    modified: float  # seconds since 1970


@dataclass(frozen=True, slots=True, order=True)
class ObjectPath:
    """The path of an object, or of the objects below it."""

    root: str  # scheme and bucket, as in s3://bucket
    key: str

    @classmethod
    def from_url(cls, url: str) -> ObjectPath:
        """Return the path of a URL. Raises StatementError if it has no bucket, or has credentials."""
        parts = urlsplit(url)
        container, at, _ = parts.netloc.rpartition("@")
        if not parts.netloc or ":" in container or (at and not parts.scheme.startswith("abfs")):
            hint = "Pass credentials in the environment, as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
            raise StatementError(
                "the URL of an object store must have a bucket" + (", and no password" if at else ""),
                hint=hint if at else "Write it as s3://bucket/prefix.",
                sqlstate=INVALID_PARAMETER_VALUE,
            )
        return cls(f"{parts.scheme}://{parts.netloc}", parts.path.strip("/"))

    def __str__(self) -> str:
        return f"{self.root}/{self.key}" if self.key else self.root

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self.root, f"{self.key}/{name}" if self.key else name)

    @property
    def name(self) -> str:
        """The last component."""
        return self.key.rpartition("/")[2]

    def read_bytes(self) -> bytes:
        """Return the contents. Raises FileNotFoundError if there is no such object."""
        return self.read()[0]

    def read(self) -> tuple[bytes, Version]:
        """Return the contents and their version."""
        import obstore

        with _storing(self):
            answer = obstore.get(_store(self.root), self.key)
            return bytes(answer.bytes()), Version.of(answer.meta)

    def range(self, start: int, length: int) -> bytes:
        """Return `length` bytes from `start` on, which must be before the end. Fewer at the end."""
        import obstore

        with _storing(self):
            return bytes(obstore.get_range(_store(self.root), self.key, start=start, length=length))

    def size(self) -> int:
        """Return the size in bytes."""
        import obstore

        with _storing(self):
            return obstore.head(_store(self.root), self.key)["size"]

    def exists(self) -> bool:
        """Return True if there is such an object."""
        try:
            self.size()
        except FileNotFoundError:
            return False
        return True

    def objects(self) -> Iterator[StoredObject]:
        """Yield the objects directly or indirectly below the path, in the order of their names."""
        import obstore

        with _storing(self):
            for page in obstore.list(_store(self.root), f"{self.key}/" if self.key else None):
                for meta in page:
                    path = ObjectPath(self.root, meta["path"])
                    yield StoredObject(path, meta["size"], meta["last_modified"].timestamp())

    def iterdir(self) -> Iterator[ObjectPath]:
        """Yield the objects directly below the path."""
        import obstore

        with _storing(self):
            listing = obstore.list_with_delimiter(_store(self.root), f"{self.key}/" if self.key else None)
            yield from (ObjectPath(self.root, meta["path"]) for meta in listing["objects"])

    def is_dir(self) -> bool:
        """Return False: an object store has no directories."""
        return False

    def put(self, data: bytes | mmap) -> Version:
        """Write the object."""
        return self._put(data, "overwrite")

    def create(self, data: bytes | mmap) -> Version:
        """Write the object, unless it exists. Raises FileExistsError if it has other contents."""
        from obstore.exceptions import AlreadyExistsError

        try:
            return self._put(data, "create")
        except AlreadyExistsError:
            return self._own(data)

    def replace(self, data: bytes | mmap, version: Version) -> Version:
        """Write the object, and return its new version. Raises FileExistsError unless it had `version` until now."""
        from obstore.exceptions import PreconditionError

        try:
            return self._put(data, {field: value for field, value in version._asdict().items() if value is not None})
        except (PreconditionError, FileNotFoundError):
            return self._own(data)

    def _put(self, data: bytes | mmap, mode: Any) -> Version:
        import obstore

        with _storing(self):
            return Version.of(obstore.put(_store(self.root), self.key, data, mode=mode, use_multipart=False))

    def _own(self, data: bytes | mmap) -> Version:
        """Return the version if an earlier attempt of the request wrote the object."""
        content, version = self.read()
        if memoryview(data) != content:
            raise FileExistsError(errno.EEXIST, "another process has written it", str(self))
        return version

    def append(self, data: bytes) -> None:
        """Add bytes to the end of the object, which is created if it does not exist."""
        try:
            content, version = self.read()
        except FileNotFoundError:
            self.create(data)
        else:
            self.replace(content + data, version)

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Remove the object if it exists. `missing_ok` has no effect.

        Amazon's stores do not say whether there was one. Those of Google and Microsoft also say that there was none
        if the answer to an earlier attempt of the request was lost.
        """
        import obstore

        with _storing(self), suppress(FileNotFoundError):
            obstore.delete(_store(self.root), self.key)

    def remove_all(self) -> None:
        """Remove all objects below the path."""
        import obstore

        assert self.key
        while keys := [stored.path.key for stored in self.objects()]:
            # If one object is gone, as in unlink(), others may be left.
            with _storing(self), suppress(FileNotFoundError):
                obstore.delete(_store(self.root), keys)
                break


def prefixes(path: ObjectPath) -> list[str]:
    """Return the names directly below a path that have objects below them."""
    import obstore

    with _storing(path):
        listing = obstore.list_with_delimiter(_store(path.root), f"{path.key}/" if path.key else None)
        return [prefix.strip("/").rpartition("/")[2] for prefix in listing["common_prefixes"]]


def upload(file: Path, path: ObjectPath) -> None:
    """Write an object from a local file, in several parts if it is large."""
    import obstore

    with _storing(path):
        obstore.put(_store(path.root), path.key, file)


def download(path: ObjectPath, file: Path) -> None:
    """Write the contents of an object to a local file. Raises FileNotFoundError if there is no such object."""
    import obstore

    with _storing(path), file.open("wb") as out:
        for chunk in obstore.get(_store(path.root), path.key):
            out.write(chunk)


class ObjectFile:
    """An object that is read in ranges. The object must not change while it is read.

    Ranges that follow one another become larger, so that a scan needs few requests and a look at the end is cheap.
    """

    def __init__(self, path: ObjectPath) -> None:
        """Open an object. Raises FileNotFoundError if there is none."""
        self._path = path
        self._size = path.size()
        self._data = b""
        self._start = 0  # offset of `_data`
        self._length = FIRST_READ

    def size(self) -> int:
        """Return the size in bytes."""
        return self._size

    def read(self, size: int, offset: int) -> bytes:
        """Return `size` bytes from `offset` on, or fewer at the end of the object."""
        size = min(size, self._size - offset)
        if size <= 0:
            return b""
        end = self._start + len(self._data)
        if not self._start <= offset <= offset + size <= end:
            kept = b""
            if self._start <= offset < end:  # the scan goes on
                kept = self._data[offset - self._start :]
                self._length = min(2 * self._length, LARGEST_READ)
            elif offset == end:
                self._length = min(2 * self._length, LARGEST_READ)
            else:
                self._length = FIRST_READ
            begin = offset + len(kept)
            length = min(max(size - len(kept), self._length), self._size - begin)
            self._data, self._start = kept + self._path.range(begin, length), offset
        begin = offset - self._start
        return self._data[begin : begin + size]

    def close(self) -> None:
        """Forget the data."""
        self._data = b""
