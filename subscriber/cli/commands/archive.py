"""`subscriber archive`: keep a change log, or check and summarize one."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subscriber.cli.dsn import MaybeSource
from subscriber.cli.logs import LogFormat, configure
from subscriber.cli.options import MIB, Json, LogFormatOption, MaybePublications, read_position
from subscriber.cli.progress import ProgressLine
from subscriber.cli.setting_option import SettingOption, read_settings
from subscriber.display import json_text, printable, printable_lines
from subscriber.errors import ChangeLogDamaged
from subscriber.formatting import count, in_bytes, in_seconds

if TYPE_CHECKING:
    from subscriber.changelog.reader import ChangeLog
    from subscriber.changelog.storage import Location


async def archive(
    directory: Annotated[
        str,
        typer.Option(help="The directory of the change log, or its URL in an object store.", metavar="DIRECTORY|URL"),
    ],
    source: MaybeSource = None,
    publications: MaybePublications = None,
    slot: Annotated[
        str, typer.Option(help="The slot to read; created if it does not exist.", metavar="NAME")
    ] = "archive",
    segment_size: Annotated[int, typer.Option(help="MiB after which a segment is sealed.", min=1)] = 64,
    segment_age: Annotated[
        float | None,
        typer.Option(
            help="Seconds after its first change after which a segment is sealed.",
            min=1,
            show_default="300, or 10 in an object store",
        ),
    ] = None,
    keep_size: Annotated[
        int | None, typer.Option(help="Remove the oldest segments beyond this many MiB.", min=1, show_default=False)
    ] = None,
    keep_age: Annotated[
        float | None, typer.Option(help="Remove segments older than this many hours.", min=0, show_default=False)
    ] = None,
    max_size: Annotated[
        int | None,
        typer.Option(
            help="Remove the oldest segments beyond this many MiB even if a consumer has not read them.",
            min=1,
            show_default=False,
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option(help="End when all changes before this position are stored.", metavar="LSN")
    ] = None,
    standby: Annotated[
        bool,
        typer.Option(
            "--standby", help="Wait while another `subscriber archive` writes the log, and take over when it ends."
        ),
    ] = False,
    info: Annotated[bool, typer.Option("--info", help="Only check all files and summarize the log.")] = False,
    forget: Annotated[
        str | None, typer.Option(help="Only remove this consumer, for which the log keeps segments.", metavar="NAME")
    ] = None,
    json: Json = False,
    log_format: LogFormatOption = LogFormat.RICH,
    setting: SettingOption = None,
) -> int:
    """Keep a change log: all committed transactions of a publisher, as files.

    Transactions are stored whole, in commit order, and synced to disk before they are confirmed to the publisher.
    Programs can read the log while it is written; see `lake`. The command ends on SIGTERM or Ctrl-C, and resumes from
    its last position when it is started again. With --info it reads the whole log, and exits 1 if a file is damaged or
    missing. In an object store, segments are stored whole when they are sealed, and their transactions are confirmed
    then. A log has one writer; start a second one with --standby. --keep-size and --keep-age remove old segments, but
    none that a consumer has not read: a lake, or a stream of Spark with the option `consumer`. --info lists the
    consumers.
    """
    if info:
        return _describe(directory, json=json)
    if forget is not None:
        return _forget_consumer(directory, forget, json=json)
    missing = [name for name, given in (("--source", source), ("--publication", publications)) if not given]
    if source is None or not publications:
        raise typer.BadParameter(f"give {' and '.join(missing)}, or --info")
    configure(log_format)
    end, settings = read_position(until), read_settings(setting)
    import anyio.to_thread

    from subscriber.archive.worker import Archiver
    from subscriber.changelog.consumers import LogRetention
    from subscriber.changelog.directory_use import DirectoryUse, check_use
    from subscriber.changelog.writer import log_writer
    from subscriber.cli.signals import stop_on_signal
    from subscriber.spool.spool import default_spool_root

    retention = LogRetention(
        keep_size=None if keep_size is None else keep_size * MIB,
        keep_age=None if keep_age is None else keep_age * 3600,
        max_size=None if max_size is None else max_size * MIB,
    )
    writer = log_writer(
        directory,
        segment_size=segment_size * MIB,
        segment_age=segment_age,
        retention=retention,
        temporary=settings.spool_dir or default_spool_root(),
    )
    await anyio.to_thread.run_sync(check_use, writer.location, DirectoryUse.CHANGE_LOG)
    if not standby:
        await anyio.to_thread.run_sync(writer.open)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stop_on_signal, tasks)
            await Archiver(source, slot, publications, writer, end, settings, standby=standby).run()
            tasks.cancel_scope.cancel()
    finally:
        writer.close()
    return 0


def _describe(directory: Location | str, *, json: bool) -> int:
    """Check all files of the log in `directory`, and print a summary and the damage.

    Returns:
        The exit status: 1 if something is damaged or missing, 0 otherwise.

    Raises:
        ChangeLogError: there is no log, or it cannot be read.
    """
    from subscriber.changelog.reader import ChangeLog

    described: dict[str, Any] = {"directory": str(directory)}
    try:
        log = ChangeLog(directory)
        described |= _summary(log)
        with ProgressLine("reading the log", json=json) as line:
            damage = log.damage(lambda done, total: line.show("reading the log", done, total, "segments"))
    except ChangeLogDamaged as error:
        damage = [error]
    if json:
        described["damage"] = [{"message": e.message, "detail": e.detail, "hint": e.hint} for e in damage]
        print(json_text(described))
        return 1 if damage else 0
    if "end" in described:
        print(f"from {described['start']} to {described['end']}")
        print(f"{count(described['segments'], 'segment')}, {in_bytes(described['bytes'])}")
        print(printable(f"slot {described['slot']}, publications {', '.join(described['publications'])}"))
        for consumer in described["consumers"]:
            print(printable(_consumer_line(consumer)))
    for damage_error in damage:
        print(printable_lines(f"ERROR:  {damage_error}", ""), file=sys.stderr)
    return 1 if damage else 0


def _consumer_line(consumer: dict[str, Any]) -> str:
    since = in_seconds(max(0, time.time() - consumer["moved"]))
    what = f"consumer {consumer['name']} ({consumer['program']}): at {consumer['lsn']} since {since}"
    return f"{what}, keeps {in_bytes(consumer['bytes'])}"


def _forget_consumer(directory: Location | str, name: str, *, json: bool) -> int:
    """Remove a consumer of the log. Returns the exit status.

    Raises:
        StatementError: there is no such consumer.
        ChangeLogError: there is no log.
    """
    from subscriber.changelog.consumers import forget
    from subscriber.changelog.reader import ChangeLog

    forget(ChangeLog(directory).directory, name)
    print(json_text({"event": "forgotten", "consumer": name}) if json else printable(f"forgot consumer {name}"))
    return 0


def _summary(log: ChangeLog) -> dict[str, Any]:
    from subscriber.changelog.consumers import read_consumers

    files = log.files()
    sizes = [(file.end, _size(file.path)) for file in files]
    consumers = [
        {
            "name": consumer.name,
            "program": consumer.program,
            "lsn": str(consumer.position),
            "moved": consumer.moved,
            "bytes": sum(size for end, size in sizes if end is not None and end > consumer.position),
        }
        for consumer in read_consumers(log.directory)
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
    from subscriber.changelog.storage import file_size

    with contextlib.suppress(FileNotFoundError):
        return file_size(path)
    return 0
