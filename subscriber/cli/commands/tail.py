"""`subscriber tail`: print the decoded change stream of a publisher, one line for each change.

Without --slot the command creates a temporary slot, which the server drops with the connection; the stream starts now.
With --slot the stream starts at that slot's position, and printed transactions are confirmed (change_printer.py).
"""

from __future__ import annotations

import secrets
from typing import Annotated

import typer

from subscriber.cli.dsn import Source
from subscriber.cli.options import Publications
from subscriber.cli.setting_option import SettingOption, read_settings
from subscriber.display import sql_literal
from subscriber.errors import PublisherError
from subscriber.lsn import Lsn
from subscriber.remedy import Remedy
from subscriber.sqlstate import UNDEFINED_OBJECT


async def tail(
    source: Source,
    publications: Publications,
    slot: Annotated[
        str | None,
        typer.Option(help="Read this slot and confirm printed changes. Default: a temporary slot.", metavar="NAME"),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", "-n", help="Stop after this many changes.", min=1)] = None,
    json: Annotated[bool, typer.Option("--json/--text", help="JSON lines, or text for people.")] = True,
    setting: SettingOption = None,
) -> int:
    """Print the decoded change stream of a publisher.

    Prints one line for each change, begin and commit. With --slot, printed changes are confirmed, in whole
    transactions, and are not sent again.
    """
    import anyio

    from subscriber.cli.change_lines import as_json, as_text
    from subscriber.cli.change_printer import ChangePrinter
    from subscriber.publisher.commands import StreamOptions
    from subscriber.publisher.connection import Publisher
    from subscriber.publisher.feedback import limit_status_interval, read_sender_timeout
    from subscriber.publisher.publications import check_publications
    from subscriber.publisher.replication_stream import ReplicationStream

    settings = read_settings(setting)
    async with await Publisher.connect(source, application_name="subscriber tail") as publisher:
        await check_publications(publisher, publications)
        if slot is None:
            name = f"subscriber_tail_{secrets.token_hex(4)}"
            start = (await publisher.create_slot(name, snapshot="nothing", temporary=True)).consistent_point
        elif await publisher.slot(slot) is None:
            raise PublisherError(
                f'replication slot "{slot}" does not exist on the publisher',
                hint=Remedy(
                    "create it there", f"SELECT pg_create_logical_replication_slot({sql_literal(slot)}, 'pgoutput');"
                ),
                sqlstate=UNDEFINED_OBJECT,
            )
        else:
            name, start = slot, Lsn(0)
        settings = limit_status_interval(settings, await read_sender_timeout(publisher))
        options = StreamOptions(tuple(publications), messages=True)
        stream = await ReplicationStream.start(publisher, name, start, options, without_own_messages=True)
        render, interval = as_json if json else as_text, settings.status_interval
        printer = ChangePrinter(stream, limit, render, confirm=slot is not None, status_interval=interval)
        try:
            await printer.run()
        finally:
            with anyio.CancelScope(shield=True):
                printer.send_status()
                await stream.stop(timeout=settings.stream_stop_timeout)
    return 0
