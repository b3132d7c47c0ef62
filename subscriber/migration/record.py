"""ServerRecord: the row of a move on one server, with its words as enums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import asyncpg

from subscriber.catalog.store import migrations
from subscriber.migration.plan import Phase, Side, Standing


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """The row of a move on one server: where it stands, as far as this server knows, and facts (MigrationRow)."""

    standing: Standing
    facts: Mapping[str, Any]


async def load(connection: asyncpg.Connection, name: str) -> ServerRecord | None:
    """Return the row of a move, or None if the server has none."""
    row = await migrations.load(connection, name)
    return None if row is None else ServerRecord(Standing(Side(row.serving), Phase(row.phase)), row.facts)


async def save(connection: asyncpg.Connection, name: str, standing: Standing, *forgotten: str, **facts: object) -> None:
    """Store where a move stands, see migrations.save()."""
    await migrations.save(connection, name, standing.serving, standing.phase, *forgotten, **facts)
