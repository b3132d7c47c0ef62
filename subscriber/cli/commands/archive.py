"""`subscriber archive`: keep a change log, or check and summarize one."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from subscriber import telemetry
from subscriber.archive.worker import Archiver
from subscriber.changelog.consumers import LogRetention, forget, read_consumers
from subscriber.changelog.directory_use import DirectoryUse, check_use
from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.storage import Location, file_size
from subscriber.changelog.writer import LogWriter, log_writer
from subscriber.cli.progress import ProgressLine
from subscriber.display import json_text, printable, printable_lines
from subscriber.errors import ChangeLogDamaged, StatementError
from subscriber.formatting import count, in_bytes, in_seconds
from subscriber.lsn import Lsn, optional_lsn
from subscriber.settings import Settings
from subscriber.spool.spool import default_spool_root
from subscriber.sqlstate import INVALID_TEXT_REPRESENTATION

MIB = 1024 * 1024


def writer(
    directory: str,
    segment_size: int,
    segment_age: float | None,
    keep_size: int | None,
    keep_age: float | None,
    max_size: int | None,
    settings: Settings,
) -> LogWriter:
    """Return a writer for the command's options: sizes in MiB, `segment_age` in seconds, `keep_age` in hours."""
    retention = LogRetention(
        keep_size=None if keep_size is None else keep_size * MIB,
        keep_age=None if keep_age is None else keep_age * 3600,
        max_size=None if max_size is None else max_size * MIB,
    )
    return log_writer(
        directory,
        segment_size=segment_size * MIB,
        segment_age=segment_age,
        retention=retention,
        temporary=settings.spool_dir or default_spool_root(),
    )


def position(text: str | None) -> Lsn | None:
    """Parse the option --until. Raises StatementError for anything that is not an LSN."""
    try:
        return optional_lsn(text)
    except ValueError:
        raise StatementError(
            f'--until must be an LSN such as 16/B374D848, not "{text}"', sqlstate=INVALID_TEXT_REPRESENTATION
        ) from None


async def archive(
    source: str,
    slot: str,
    publications: Sequence[str],
    writer: LogWriter,
    *,
    until: Lsn | None,
    standby: bool,
    settings: Settings,
) -> int:
    """Write the log until SIGTERM, SIGINT or `until`; the exit status. `standby`: wait while another process does."""
    await anyio.to_thread.run_sync(check_use, writer.location, DirectoryUse.CHANGE_LOG)
    if not standby:
        await anyio.to_thread.run_sync(writer.open)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_stop_on_signal, tasks)
            await Archiver(source, slot, publications, writer, until, settings, standby=standby).run()
            tasks.cancel_scope.cancel()
    finally:
        writer.close()
    return 0


async def _stop_on_signal(tasks: TaskGroup) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            telemetry.log(telemetry.LOG, "received shutdown request", event="archive.stopping")
            tasks.cancel_scope.cancel()
            return


def describe(directory: Location | str, *, json: bool) -> int:
    """Check all files of the log in `directory`, and print a summary and the damage.

    Returns:
        The exit status: 1 if something is damaged or missing, 0 otherwise.

    Raises:
        ChangeLogError: there is no log, or it cannot be read.
    """
    found: dict[str, Any] = {"directory": str(directory)}
    try:
        log = ChangeLog(directory)
        found |= _summary(log)
        with ProgressLine("reading the log", json=json) as line:
            damage = log.damage(lambda done, total: line.show("reading the log", done, total, "segments"))
    except ChangeLogDamaged as error:
        damage = [error]
    if json:
        found["damage"] = [{"message": e.message, "detail": e.detail, "hint": e.hint} for e in damage]
        print(json_text(found))
        return 1 if damage else 0
    if "end" in found:
        print(f"from {found['start']} to {found['end']}")
        print(f"{count(found['segments'], 'segment')}, {in_bytes(found['bytes'])}")
        print(printable(f"slot {found['slot']}, publications {', '.join(found['publications'])}"))
        for consumer in found["consumers"]:
            print(printable(_consumer_line(consumer)))
    for one in damage:
        print(printable_lines(f"ERROR:  {one}", ""), file=sys.stderr)
    return 1 if damage else 0


def _consumer_line(consumer: dict[str, Any]) -> str:
    since = in_seconds(max(0, time.time() - consumer["moved"]))
    what = f"consumer {consumer['name']} ({consumer['program']}): at {consumer['lsn']} since {since}"
    return f"{what}, keeps {in_bytes(consumer['bytes'])}"


def forget_consumer(directory: Location | str, name: str, *, json: bool) -> int:
    """Remove a consumer of the log. Returns the exit status.

    Raises:
        StatementError: there is no such consumer.
        ChangeLogError: there is no log.
    """
    forget(ChangeLog(directory).directory, name)
    print(json_text({"event": "forgotten", "consumer": name}) if json else printable(f"forgot consumer {name}"))
    return 0


def _summary(log: ChangeLog) -> dict[str, Any]:
    files = log.files()
    sizes = [(file.end, _size(file.path)) for file in files]
    consumers = [
        {
            "name": one.name,
            "program": one.program,
            "lsn": str(one.position),
            "moved": one.moved,
            "bytes": sum(size for end, size in sizes if end is not None and end > one.position),
        }
        for one in read_consumers(log.directory)
    ]
    return {
        "slot": log.identity.slot,
        "publications": list(log.identity.publications),
        "system_id": str(log.identity.system_id),
        "start": str(log.start()),
        "end": str(log.end()),
        "segments": len(files),
        "bytes": sum(size for _, size in sizes),
        "consumers": consumers,
    }


def _size(path: Location) -> int:
    """Bytes in a file; 0 if it has been sealed, and so renamed, or removed since it was listed."""
    with contextlib.suppress(FileNotFoundError):
        return file_size(path)
    return 0
