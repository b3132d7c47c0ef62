"""PublisherLog: the change log of a query of pgcdc that has the option `conninfo`, and writes the log itself.

archiving() does the same for a program.

A stream has to read the same changes again after a kill, in several tasks, and a slot sends them once. So a query that
reads straight from a publisher stores the changes first, in the log that `path` names. It runs the archiver as standby:
if `subscriber archive` or another query writes the log, it only reads.

Options:

    conninfo        the connection string of the publisher
    publications    names of publications, separated by commas; in double quotes if they have commas
    slot            the replication slot, which is created with the log. Default: pgcdc
    keepSize        remove the oldest segments of the log beyond this number of MiB
    keepAge         remove segments of the log that are older than this number of hours

**Failure cases**, in addition to those of the archiver.

- Driver killed: the operating system releases the lock of the log, and the query continues it when it starts again. In
  an object store the lease has to end first.
- Query stopped: the slot stays, and the publisher retains WAL for it, as for every slot.
- Publisher not reachable when the query starts: the query fails. Later, the archiver retries, and logs each attempt.
  After PATIENCE without success the query fails with the last error.
- Slot lost, another publisher answers, or the log is damaged: the next micro-batch fails with the error.
- Killed while the snapshot is written: the next start of the query writes it again.
- Killed after the slot is created, before the log is: the file `slot` of the directory shows whose slot it is.
- Slot of the name exists when the log is created: an error, because another log may need its changes.
- Two queries start with one snapshot that does not exist yet: the second one waits for it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from time import monotonic, sleep

from anyio.from_thread import start_blocking_portal

from subscriber import telemetry
from subscriber.archive.worker import Archiver, check_options
from subscriber.changelog.consumers import KEEP_ALL, LogRetention
from subscriber.changelog.directory_use import DirectoryUse, check_use
from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.storage import Location, location, make_private_directory, write_file
from subscriber.changelog.writer import log_writer
from subscriber.display import sql_literal
from subscriber.errors import ChangeLogError, StatementError
from subscriber.lsn import Lsn
from subscriber.remedy import Remedy
from subscriber.spark.publisher_snapshot import publisher_session
from subscriber.spark.snapshot.writer import write_snapshot
from subscriber.spark.sources.options import name_list, positive_number
from subscriber.spark.sources.table_snapshot import MANIFEST
from subscriber.spool.spool import default_spool_root
from subscriber.sqlstate import DUPLICATE_OBJECT, INVALID_PARAMETER_VALUE, OBJECT_IN_USE

SLOT = "pgcdc"
CLAIM = "slot"  # the file with the name of the slot that is created for the log
MIB = 1024 * 1024
HOUR = 3600
PATIENCE = 300.0  # seconds
_WAITS = ("archive.slot_wait", "snapshot.wait")  # the events of log lines
_WAIT_POLL = 0.5  # seconds
_WAIT_REPORT = 60.0  # seconds between two log lines of a wait


def show_waits() -> None:
    """Print why a query waits, in a Python worker of Spark, which has no configured logging."""
    telemetry.print_events(_WAITS)


class PublisherLog:
    """Writes the change log of a query. Call stop() at the end."""

    def __init__(
        self,
        source: str,
        log: Location | str,
        publications: Sequence[str],
        *,
        slot: str = SLOT,
        retention: LogRetention = KEEP_ALL,
        patience: float = PATIENCE,
    ) -> None:
        """Prepare the log. Nothing is read or written yet.

        Args:
            source: the connection string of the publisher.
            log: the directory or URL of the change log.
            publications: the names of publications.
            slot: the name of the slot.
            retention: what the log keeps.
            patience: seconds for which follow() tolerates an error that the archiver retries.
        """
        self._conninfo = source
        self._slot = slot
        self._publications = publications
        self._retention = retention
        self._directory = location(log)
        self._patience = patience
        self._resources = ExitStack()
        self._archiver: Archiver | None = None
        self._archiving: Future[None] | None = None

    @classmethod
    def of_options(cls, options: Mapping[str, str]) -> PublisherLog:
        """Return the log of a query with the options `conninfo` and `path`.

        Raises:
            StatementError: an option is missing or invalid.
        """
        publications = _publications(options.get("publications", ""))
        if not publications:
            raise StatementError(
                'pgcdc needs the option "publications" with the option "conninfo"',
                hint="Name the publications whose changes the log has.",
                sqlstate=INVALID_PARAMETER_VALUE,
            )
        size = positive_number("pgcdc", options, "keepSize")
        retention = LogRetention(keep_size=None if size is None else size * MIB, keep_age=_age(options))
        slot = options.get("slot") or SLOT
        return cls(options["conninfo"], options["path"], publications, slot=slot, retention=retention)

    def begin(self) -> None:
        """Create the log if it does not exist, with a slot of its own.

        Raises:
            StatementError: the directory has something else, or the slot exists.
            PublisherError: the log has another slot, or other publications.
            ChangeLogError: the log cannot be read or written.
            SubscriberError: the publisher cannot be read.
        """
        if self._exists():
            check_options(ChangeLog(self._directory).identity, self._directory, self._slot, self._publications)
            return
        check_use(self._directory, DirectoryUse.CHANGE_LOG)
        with start_blocking_portal() as portal:
            portal.call(self._claim_slot)
        try:
            self.catch_up()
        except BaseException:
            if not self._exists():  # another log may create this slot now
                (self._directory / CLAIM).unlink(missing_ok=True)
            raise

    def take_snapshot(self, directory: str, tables: Sequence[str], consumer: str | None) -> None:
        """Write a snapshot if `directory` has none, or wait while another process writes it.

        Arguments and errors are those of write_snapshot().
        """
        report = monotonic()  # when the next line is due
        while not (location(directory) / MANIFEST).exists():
            try:
                write_snapshot(
                    self._conninfo, log=self._directory, directory=directory, tables=tables, consumer=consumer
                )
            except StatementError as error:
                if error.sqlstate != OBJECT_IN_USE:
                    raise
                if monotonic() >= report:
                    telemetry.log(telemetry.LOG, f"waiting: {error.message}", event="snapshot.wait")
                    report = monotonic() + _WAIT_REPORT
                sleep(_WAIT_POLL)

    def catch_up(self) -> None:
        """Bring the log to the present position of the publisher.

        Raises:
            SubscriberError: any error of the publisher or the log.
        """
        with start_blocking_portal() as portal:
            portal.call(self._catch_up)

    def follow(self) -> None:
        """Store changes in the background until stop().

        Raises:
            SubscriberError: the publisher cannot be reached at the first call, or changes cannot be stored any more.
        """
        if self._archiving is None:
            self._archiver = self._resources.enter_context(self._opened())
            portal = self._resources.enter_context(start_blocking_portal())
            portal.call(self._position)
            self._archiving = portal.start_task_soon(self._archiver.run)
            self._resources.callback(self._archiving.cancel)
        elif self._archiving.done():
            self._archiving.result()
        elif (archiver := self._archiver) is not None and archiver.error is not None:
            since = archiver.failing_since or monotonic()
            if monotonic() - since > self._patience:
                raise archiver.error

    def stop(self) -> None:
        """End follow(). The publisher sends changes again that were not stored."""
        self._resources.close()
        self._archiving = None

    def _exists(self) -> bool:
        return (self._directory / DirectoryUse.CHANGE_LOG.value).exists()

    async def _claim_slot(self) -> None:
        """Write the name of the slot to the directory before the slot is created.

        Another log may need the changes of a slot that exists. One that has this name in the directory was created
        for this log, by a process that was killed or runs now.
        """
        async with publisher_session(self._conninfo, "pgcdc") as publisher:
            slot = await publisher.slot(self._slot)
        claim, name = self._directory / CLAIM, self._slot.encode()
        if claim.exists() and claim.read_bytes() == name:
            return
        if slot is not None:
            raise StatementError(
                f'replication slot "{self._slot}" exists, and the change log in "{self._directory}" does not',
                detail="Another log or program may need the changes of the slot.",
                hint=Remedy(
                    'name another slot with the option "slot".',
                    alternative=Remedy(
                        "if nothing else reads the slot, on the publisher",
                        f"SELECT pg_drop_replication_slot({sql_literal(self._slot)});",
                    ),
                ),
                sqlstate=DUPLICATE_OBJECT,
            )
        try:
            make_private_directory(self._directory)
            write_file(claim, name)
        except OSError as error:
            raise ChangeLogError(
                f'could not create the change log in "{self._directory}": {error.strerror or error}',
                hint="Give a directory or the URL of a store that this process can write.",
            ) from error

    async def _catch_up(self) -> None:
        with self._opened(await self._position()) as archiver:
            await archiver.run_once()

    async def _position(self) -> Lsn:
        async with publisher_session(self._conninfo, "pgcdc") as publisher:
            return (await publisher.identify_system()).position

    @contextmanager
    def _opened(self, until: Lsn | None = None) -> Iterator[Archiver]:
        """Yield an archiver of the log up to a position, and close the log. None: no end."""
        writer = log_writer(self._directory, retention=self._retention, temporary=default_spool_root())
        with closing(writer):
            yield Archiver(self._conninfo, self._slot, self._publications, writer, until, standby=True)


@contextmanager
def archiving(
    source: str, *, log: Location | str, publications: Collection[str] | str, slot: str = SLOT
) -> Iterator[None]:
    """Write a change log during the block, as `subscriber archive` and the queries of pgcdc with `conninfo` do.

    Such a query begins its log when it starts. A snapshot of large tables, which executors read with
    `write_snapshot(…, spark=spark)`, needs the log before:

        with archiving(source, log="/srv/log", publications="shop_pub"):
            write_snapshot(source, log="/srv/log", directory="/srv/snapshot", spark=spark)

    Args:
        source: the connection string of the publisher.
        log: the directory or URL of the change log, which is created if it does not exist.
        publications: the names of publications.
        slot: the replication slot, which is created with the log.

    Raises:
        StatementError: the directory has something else, or the log does not exist and the slot does.
        SubscriberError: the publisher cannot be read when the block begins, or changes could not be stored during it.
    """
    writer = PublisherLog(source, log, name_list(publications), slot=slot)
    try:
        writer.begin()
        writer.follow()
        yield
        writer.follow()
    finally:
        writer.stop()


def _publications(text: str) -> list[str]:
    """Return names that are separated by commas. A name in double quotes can have commas, as in SQL."""
    names = re.findall(r'\s*(?:"((?:[^"]|"")+)"|([^,]+?))\s*(?:,|$)', text)
    return [quoted.replace('""', '"') or plain for quoted, plain in names if quoted or plain.strip()]


def _age(options: Mapping[str, str]) -> float | None:
    """Return the seconds of `keepAge`. Raises StatementError if it is not a number of hours."""
    text = options.get("keepAge")
    if not text:
        return None
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        raise StatementError(
            f'option "keepAge" of pgcdc must be a number of hours, not "{text}"', sqlstate=INVALID_PARAMETER_VALUE
        )
    return float(text) * HOUR
