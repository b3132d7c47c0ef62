"""MySQL and MariaDB as the target of a mirror (targets/sqlalchemy/database.py).

By default they cut values that are too long, treat 'a' and 'A ' as the same key, replace the number 0 of a row by
another one, and overwrite any row that has the same value in any unique index, all without an error.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from subscriber.errors import MappingError

MYSQL = ("mysql", "mariadb")  # as SQLAlchemy calls them

# The collations that distinguish all texts, the best one first: the last one ignores trailing spaces.
_EXACT = ("utf8mb4_0900_bin", "utf8mb4_nopad_bin", "utf8mb4_bin")
_PACKET_TOO_LARGE = 1153  # ER_NET_PACKET_TOO_LARGE; other versions close the connection without it
_SESSION = (
    "SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_AUTO_VALUE_ON_ZERO,NO_ENGINE_SUBSTITUTION'",
    "SET SESSION time_zone = '+00:00'",  # columns of type TIMESTAMP take times as of the session's zone
)


def prepare_sessions(engine: AsyncEngine) -> None:
    """Make each session of `engine` refuse values that it cannot store unchanged."""
    if engine.dialect.name not in MYSQL:
        return

    # Before SQLAlchemy reads sql_mode, which decides how it quotes names.
    @event.listens_for(engine.sync_engine, "connect", insert=True)
    def prepare(connection: Any, _: Any) -> None:
        cursor = connection.cursor()
        for statement in _SESSION:
            cursor.execute(statement)
        cursor.close()


def refused_hint(dialect: str, error: BaseException | None) -> str | None:
    """Return what to do about an error of the driver. None: nothing is known."""
    if dialect not in MYSQL or error is None or error.args[:1] != (_PACKET_TOO_LARGE,):
        return None
    return "A value is larger than the server's max_allowed_packet. Increase that, and start the mirror again."


def lost_hint(dialect: str) -> str | None:
    """Return another possible reason for which a server has closed the connection."""
    if dialect not in MYSQL:
        return None
    return "If it is the same each time, a value may be larger than the server's max_allowed_packet."


def table_options(collation: str = _EXACT[-1]) -> dict[str, Any]:
    """Return the options of created tables: with transactions, all of Unicode, and comparisons as in PostgreSQL."""
    options = {"engine": "InnoDB", "charset": "utf8mb4", "collate": collation}
    return {f"{name}_{option}": value for name in MYSQL for option, value in options.items()}


def exact_collation(connection: Connection) -> str:
    """The best one that the server has; they have different ones."""
    if connection.dialect.name not in MYSQL:
        return _EXACT[-1]
    names = text("SELECT collation_name FROM information_schema.collations WHERE collation_name LIKE 'utf8mb4%bin'")
    collations = set(connection.scalars(names))
    return next(collation for collation in _EXACT if collation in collations)


def require_exact(connection: Connection, name: str, columns: Collection[str], key: Collection[str]) -> None:
    """Raises MappingError for a table in which rows could be lost, or taken for others."""
    if connection.dialect.name not in MYSQL:
        return
    if unfit := [column for column in columns if "%" in column or "`" in column]:
        raise MappingError(
            f'the driver cannot write to column "{unfit[0]}" of table "{name}"',
            detail="There is a percent sign or a backtick in its name.",
        )
    here = "WHERE table_schema = DATABASE() AND table_name = :name"
    parameters = {"name": name}
    engine = connection.scalar(text(f"SELECT engine FROM information_schema.tables {here}"), parameters)
    known = text("SELECT transactions FROM information_schema.engines WHERE engine = :engine")
    if connection.scalar(known, {"engine": engine}) != "YES":
        raise MappingError(
            f'table "{name}" of the target has no transactions',
            detail=f"Its engine is {engine}.",
            hint="Convert it to InnoDB.",
        )
    compared = text(f"SELECT column_name, collation_name FROM information_schema.columns {here}")
    for column, collation in connection.execute(compared, parameters):
        if column in key and collation is not None and not collation.endswith("_bin"):
            raise MappingError(
                f'key column "{column}" of table "{name}" of the target takes different texts for the same',
                detail=f"Its collation is {collation}.",
                hint="Give it one that ends in _bin.",
            )
    unique = text(f"SELECT index_name FROM information_schema.statistics {here} AND non_unique = 0")
    if others := sorted(set(connection.scalars(unique, parameters)) - {"PRIMARY"}):
        raise MappingError(
            f'table "{name}" of the target has a unique index besides its primary key: {others[0]}',
            detail="MySQL would write over the row that has the same value there.",
            hint="Make an index of it that is not unique.",
        )
