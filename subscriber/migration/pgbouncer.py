"""A hook for PgBouncer: clients wait during the pause, and continue on the new server without an error.

    pause     PAUSE of the database: transactions end, clients with a further one wait
    switch    the entry of the database in pgbouncer.ini gets the new host, port and name; RELOAD
    resume    RESUME

The file is replaced as a whole, so a kill leaves the old or the new one. Other lines of it stay as they are.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import asyncpg

from subscriber.connection.connect import connect
from subscriber.connection.errors import server_fields
from subscriber.errors import ConnectionLost, ServerError, SubscriberError
from subscriber.migration.hooks import HookCall, HookEvent, HookFunction
from subscriber.quoting import identifier, replication_literal
from subscriber.sqlstate import UNDEFINED_OBJECT

_SECTION = re.compile(r"\s*\[(?P<name>[^\]]+)\]")
_WORD = re.compile(r"(?P<key>\w+)\s*=\s*(?P<value>'(?:[^']|'')*'|[^\s']+)")


def pgbouncer_hook(console: str, config: Path, database: str) -> HookFunction:
    """Return a hook for one PgBouncer.

    Args:
        console: the connection string of its admin console, with database pgbouncer.
        config: the file with section [databases].
        database: the name by which clients connect. The file must have an entry for it.
    """

    async def run(call: HookCall) -> None:
        match call.event:
            case HookEvent.PAUSE:
                await _execute(console, f"PAUSE {identifier(database)}")
            case HookEvent.SWITCH:
                _change_entry(config, database, call)
                await _execute(console, "RELOAD")
            case HookEvent.RESUME:
                await _execute(console, f"RESUME {identifier(database)}", ignore="is not paused")

    return run


def with_server(text: str, database: str, host: str, port: int, name: str) -> str:
    """Return the text of pgbouncer.ini with another server for a database.

    Raises:
        SubscriberError: section [databases] has no entry for the database.
    """
    lines, section = text.splitlines(keepends=True), ""
    for number, line in enumerate(lines):
        if section_match := _SECTION.match(line):
            section = section_match["name"].strip()
        key, separator, value = line.partition("=")
        if section != "databases" or not separator or key.strip().strip('"') != database or key.lstrip()[:1] in ";#":
            continue
        words = {word["key"]: word["value"] for word in _WORD.finditer(value)}
        words |= {"host": _quoted(host), "port": str(port), "dbname": _quoted(name)}
        ending = line[len(line.rstrip("\r\n")) :]
        lines[number] = f"{key.rstrip()} = {' '.join(f'{word}={value}' for word, value in words.items())}{ending}"
        return "".join(lines)
    raise SubscriberError(
        f'section [databases] of pgbouncer.ini has no entry "{database}"',
        hint="An entry * cannot be moved. Add one for the database.",
        sqlstate=UNDEFINED_OBJECT,
    )


def _quoted(value: str) -> str:
    return value if re.fullmatch(r"[\w.:/-]+", value) else replication_literal(value)


def _change_entry(path: Path, database: str, call: HookCall) -> None:
    text = with_server(path.read_text(), database, call.host, call.port, call.database)
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)  # of a command that was killed
    status = path.stat()
    # The entries have passwords. Nobody else reads the file before it has the owner and the mode of the old one.
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
        os.chown(new, status.st_uid, status.st_gid)
    new.chmod(status.st_mode & 0o777)
    new.replace(path)


async def _execute(console: str, command: str, *, ignore: str | None = None) -> None:
    """Run a command of the console. An error that contains `ignore` means that its effect is there already."""
    connection = await connect(console, plain=True)
    try:
        await connection.execute(command)
    except asyncpg.PostgresError as error:
        if ignore is None or ignore not in str(error):
            raise ServerError(server_fields(error)) from error
    except (asyncpg.InterfaceError, OSError) as error:
        raise ConnectionLost(f"lost connection to PgBouncer: {error}") from error
    finally:
        connection.terminate()
