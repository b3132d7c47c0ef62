"""ServerRecord: the row of a move on one server, with its words as enums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import asyncpg

from subscriber.catalog.store import migrations
from subscriber.errors import StatementError
from subscriber.migration.plan import Phase, Side, Standing
from subscriber.sqlstate import INVALID_PARAMETER_VALUE


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """The row of a move on one server: where it stands, as far as this server knows, and facts (MigrationRow)."""

    standing: Standing
    facts: Mapping[str, Any]


async def load(connection: asyncpg.Connection, name: str) -> ServerRecord | None:
    """Return the row of a move, or None if the server has none."""
    row = await migrations.load(connection, name)
    return None if row is None else ServerRecord(Standing(Side(row.serving), Phase(row.phase)), row.facts)


def refuse_other_side(facts: Mapping[str, Any], side: Side, name: str) -> None:
    """Refuse a server that has the other side of a move.

    Args:
        facts: of the server's row. Rows of earlier versions do not have the side.
        side: the side for which the server was given.
        name: of the move.

    Raises:
        StatementError: the connection strings are exchanged.
    """
    if facts.get("side", side) != side:
        raise StatementError(
            f"the {side} of this command is the {side.other} of the move {name}",
            hint="Exchange --source and --target. For another move, choose another name.",
            sqlstate=INVALID_PARAMETER_VALUE,
        )


async def save(connection: asyncpg.Connection, name: str, standing: Standing, *forgotten: str, **facts: object) -> None:
    """Store where a move stands, see migrations.save()."""
    await migrations.save(connection, name, standing.serving, standing.phase, *forgotten, **facts)
