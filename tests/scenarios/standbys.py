"""Physical standbys of a server, made with pg_basebackup."""

from __future__ import annotations

import shutil

from subscriber.demo.servers import Server, Servers
from tests.plugins.fix_cluster import SETTINGS


async def standby_of(
    primary: Server, servers: Servers, name: str, *, programs: Server | None = None, **settings: str
) -> Server:
    """Start a hot standby of `primary`, which streams from it through a slot.

    Args:
        programs: a server of a version that has pg_basebackup and is not older. None: the primary.
        settings: the standby's own.
    """
    standby = await servers.create(name, {**SETTINGS, **primary.settings, **settings}, bin=primary.bin)
    shutil.rmtree(standby.data)
    options = ("--write-recovery-conf", "--create-slot", "--slot", name, "--checkpoint=fast", "--no-sync")
    backup = ("--pgdata", str(standby.data), *options, "--dbname", primary.dsn())
    await (programs or primary).program("pg_basebackup", *backup)
    await standby.start()
    return standby


async def promote(standby: Server) -> None:
    """Make a standby a primary, on a timeline of its own."""
    await standby.program("pg_ctl", "promote", "--wait", "-D", str(standby.data))
