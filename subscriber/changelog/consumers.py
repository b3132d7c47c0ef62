"""Consumers of a change log: programs that read it from where they stopped. Retention keeps segments for them.

    consumers/<name>    a JSON object: the program, the position before which it has stored all changes, and the time

**Purpose.** A reader that is stopped for a week has to find the log as it left it. A registered consumer keeps all
segments after its position, even beyond the limits of age and size.

**Invariants.**

- A consumer moves its position after it has stored the changes before it. So a kill makes the log keep too much, and
  never too little.
- Segments are removed oldest first. One that a consumer needs stays, with all that follow, unless the log is larger
  than `max_size`.

**Failure cases.**

- Consumer that is not run again: the log grows. `subscriber archive --info` names it, and `--forget` removes it.
- Consumer registered while retention removes segments that it needs: ChangeLog.check() raises an error, so there is no
  gap.
- File of a consumer damaged: nothing is removed, because its position is not known.
- Process that may only read the log: it cannot register, and is not a consumer.
"""

from __future__ import annotations

import errno
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from subscriber import telemetry
from subscriber.changelog.files import damaged, reading
from subscriber.changelog.storage import Location, file_names, for_each, make_directory, read_file, write_file
from subscriber.errors import ChangeLogError, StatementError
from subscriber.lsn import Lsn
from subscriber.sqlstate import INSUFFICIENT_PRIVILEGE, INVALID_PARAMETER_VALUE, IO_ERROR, UNDEFINED_OBJECT

FOLDER = "consumers"
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NAME = re.compile(r"(?!.*\.tmp$)[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}")  # .tmp: write_file() was killed


@dataclass(frozen=True, slots=True)
class LogConsumer:
    """A program that reads the log.

    Attributes:
        name: its name.
        program: a description for people.
        position: it has stored all changes before this position.
        moved: when the position was stored, in seconds since 1970.
    """

    name: str
    program: str
    position: Lsn
    moved: float


def check_name(name: str) -> str:
    """Return the name of a consumer. Raises StatementError if it is not valid."""
    if _NAME.fullmatch(name) is None:
        raise StatementError(
            f'"{name}" is not the name of a consumer',
            hint="Use up to 63 letters, digits, and after the first character also . _ -",
            sqlstate=INVALID_PARAMETER_VALUE,
        )
    return name


def register(log: Location, name: str, program: str, position: Lsn) -> None:
    """Register a consumer, or move it to another position.

    Args:
        log: the directory of the log.
        name: the name.
        program: a description for people.
        position: the consumer has stored all changes before it.

    Raises:
        StatementError: the name is not valid.
        ChangeLogError: the file cannot be written.
    """
    path = log / FOLDER / check_name(name)
    fields = {"program": program, "position": str(position), "moved": time.time()}
    try:
        make_directory(log / FOLDER)
        write_file(path, json.dumps(fields).encode())
    except OSError as error:
        is_refused = error.errno in _REFUSED
        raise ChangeLogError(
            f'could not register consumer "{name}" of the change log in "{log}": {error.strerror}',
            hint=f'Let this process write in "{log / FOLDER}".' if is_refused else None,
            sqlstate=INSUFFICIENT_PRIVILEGE if is_refused else IO_ERROR,
        ) from error


def register_reader(log: Location, name: str, program: str, position: Lsn) -> bool:
    """Register a consumer unless this process may only read the log. Returns False then. Args as for register().

    Raises:
        ChangeLogError: the file cannot be written, for another reason.
    """
    try:
        register(log, name, program, position)
    except ChangeLogError as error:
        if error.sqlstate != INSUFFICIENT_PRIVILEGE:
            raise
        return False
    return True


def read_consumers(log: Location) -> list[LogConsumer]:
    """Return the consumers, by name.

    Raises:
        ChangeLogDamaged: the file of a consumer is damaged.
        ChangeLogError: it cannot be read.
    """
    names = sorted(name for name in file_names(log / FOLDER) if _NAME.fullmatch(name))
    return [consumer for consumer in for_each(log, lambda name: _read(log, name), names) if consumer is not None]


def _read(log: Location, name: str) -> LogConsumer | None:
    path = log / FOLDER / name
    try:
        with reading(path):
            fields = json.loads(read_file(path))
        return LogConsumer(name, str(fields["program"]), Lsn.parse(fields["position"]), float(fields["moved"]))
    except FileNotFoundError:  # it has been forgotten since
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(
            f'file "{path}" of a consumer is damaged',
            detail=f"It cannot be understood: {error}.",
            hint="Remove the file. The consumer registers again when it is started.",
        ) from error


def forget(log: Location, name: str, *, missing_ok: bool = False) -> None:
    """Remove a consumer, for which the log then keeps nothing.

    Raises:
        StatementError: there is no such consumer, and `missing_ok` is false.
        OSError: the file cannot be removed.
    """
    known = file_names(log / FOLDER)
    if name not in known:
        if missing_ok:
            return
        raise StatementError(
            f'the change log has no consumer "{name}"',
            hint=f"Its consumers are {', '.join(known)}." if known else "It has none.",
            sqlstate=UNDEFINED_OBJECT,
        )
    (log / FOLDER / name).unlink()


class StoredSegment(NamedTuple):
    """A segment that retention may remove. `modified` is in seconds since 1970."""

    end: Lsn
    size: int
    modified: float


@dataclass(frozen=True, slots=True)
class LogRetention:
    """The limits of a log. None: no limit.

    Attributes:
        keep_size: bytes of all segments, beyond which the oldest are removed.
        keep_age: seconds after which a segment is removed.
        max_size: bytes of all segments, beyond which the oldest are removed even if a consumer needs them.
    """

    keep_size: int | None = None
    keep_age: float | None = None
    max_size: int | None = None

    @property
    def has_limits(self) -> bool:
        """Return True if segments may be removed."""
        return (self.keep_size, self.keep_age, self.max_size) != (None, None, None)

    def removable(
        self, segments: Sequence[StoredSegment], consumers: Sequence[LogConsumer]
    ) -> Iterator[list[LogConsumer]]:
        """Yield, for each segment that is removed, the consumers that still need it.

        Args:
            segments: all sealed segments, oldest first.
            consumers: the consumers of the log.
        """
        total, oldest = sum(segment.size for segment in segments), time.time() - (self.keep_age or 0)
        for segment in segments:
            needed = [consumer for consumer in consumers if consumer.position < segment.end]
            is_old = self.keep_age is not None and segment.modified < oldest
            is_expired = is_old or (self.keep_size is not None and total > self.keep_size)
            if not (is_expired and not needed) and not (self.max_size is not None and total > self.max_size):
                return
            yield needed
            total -= segment.size


KEEP_ALL = LogRetention()
File = TypeVar("File")


def expired(
    log: Location, retention: LogRetention, list_segments: Callable[[], Sequence[tuple[StoredSegment, File]]]
) -> Iterator[File]:
    """Yield the files of the segments to remove, oldest first, and log them.

    Args:
        log: the directory of the log.
        retention: the limits. Without one, nothing is listed or read.
        list_segments: returns all sealed segments, oldest first, with their files.
    """
    if not retention.has_limits:
        return
    segments = list_segments()
    try:
        consumers = read_consumers(log)
    except ChangeLogError as error:
        telemetry.log_error(error, telemetry.WARNING)
        return
    removed = retention.removable([segment for segment, _ in segments], consumers)
    for needed, (segment, file) in zip(removed, segments, strict=False):
        yield file
        message = f"removed the segment that ends at {segment.end} from the change log"
        if needed:
            names = ", ".join(consumer.name for consumer in needed)
            hint = "Raise --max-size, or have these consumers read more often. They need a new copy of the tables."
            telemetry.log(telemetry.WARNING, f"{message}, although {names} has not read it", hint=hint)
        else:
            telemetry.log(telemetry.LOG, message)
