"""Physical standbys of a server, made with pg_basebackup."""

from __future__ import annotations

import shutil

from subscriber.ops.servers import Server, Servers
from tests.plugins.fix_cluster import SETTINGS


async def standby_of(primary: Server, servers: Servers, name: str) -> Server:
    """Start a hot standby of `primary`, which streams from it."""
    standby = await servers.create(name, {**SETTINGS, **primary.settings})
    shutil.rmtree(standby.data)
    await standby.program(
        "pg_basebackup", "--pgdata", str(standby.data), "--write-recovery-conf", "--checkpoint=fast",
        "--dbname", primary.dsn(),
    )  # fmt: skip
    await standby.start()
    return standby


async def promote(standby: Server) -> None:
    """Make a standby a primary, on a timeline of its own."""
    await standby.program("pg_ctl", "promote", "--wait", "-D", str(standby.data))
