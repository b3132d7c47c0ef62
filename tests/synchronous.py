"""Commits of a server that wait for a synchronous standby which does not exist."""

from __future__ import annotations

from typing import Any

import anyio
import asyncpg


async def block_commits(session: asyncpg.Connection[Any]) -> None:
    """Let the commits of a server wait from now on. The server needs a moment for that, so a commit tries it."""
    await session.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    await session.execute("SELECT pg_reload_conf()")
    with anyio.fail_after(20):
        while True:
            try:
                await session.execute("SELECT pg_logical_emit_message(true, 'tests', '')", timeout=0.1)
            except TimeoutError:
                return


async def release_commits(session: asyncpg.Connection[Any]) -> None:
    """Let the commits of a server wait no longer."""
    await session.execute("ALTER SYSTEM RESET synchronous_standby_names")
    await session.execute("SELECT pg_reload_conf()")
