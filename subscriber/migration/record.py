"""ServerRecord: the row of a move on one server, with the facts that later steps and the undo need.

The facts are stored as one JSON value. MoveFacts is their only reader and writer. A row that it does not understand is
an error, because a fact that is left out would have a later step do too little: applications would stay locked out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import asyncpg

from subscriber.catalog.store import migrations
from subscriber.display import sql_literal
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.migration.fence import Grant
from subscriber.migration.plan import Phase, Side, Standing
from subscriber.remedy import Remedy
from subscriber.sqlstate import DATA_CORRUPTED, INVALID_PARAMETER_VALUE

PUBLICATION_NAMES = """
SELECT p.pubname::text AS name FROM pg_catalog.pg_publication p WHERE p.oid = ANY ($1::bigint[]::oid[]) ORDER BY 1
"""


@dataclass(frozen=True, slots=True)
class ClosedFence:
    """Who could connect before a fence was closed, and the roles that can now."""

    grants: tuple[Grant, ...]
    kept: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoppedSubscription:
    """The position at which a subscription was disabled, and the slot that it had."""

    at: Lsn
    slot: str


@dataclass(frozen=True, slots=True)
class MoveFacts:
    """The facts of a move that one server knows beside the standing.

    Attributes:
        side: the side of this server.
        fence: of the server. None: it is open, or there is none.
        stopped: the subscription of this server. None: it was not disabled, or is enabled again.
        held: hooks have stopped the applications, and have not let them resume.
        redirect: hooks are due that lead applications to this server.
        publications: OIDs of those that the move has created on this server. Somebody else's may get the name of one.
    """

    side: Side
    fence: ClosedFence | None = None
    stopped: StoppedSubscription | None = None
    held: bool = False
    redirect: bool = False
    publications: tuple[int, ...] = ()

    @property
    def admitted(self) -> tuple[str, ...]:
        """The roles that the closed fence admits, apart from superusers."""
        return () if self.fence is None else self.fence.kept

    def as_json(self) -> str:
        """Return the facts as they are stored."""
        fence = self.fence and {"grants": [grant.as_json() for grant in self.fence.grants], "kept": self.fence.kept}
        stopped = self.stopped and {"at": str(self.stopped.at), "slot": self.stopped.slot}
        return json.dumps(
            {
                "side": self.side,
                "fence": fence,
                "stopped": stopped,
                "held": self.held,
                "redirect": self.redirect,
                "publications": self.publications,
            },
            ensure_ascii=False,  # each encoding of a database has its own names
        )

    @classmethod
    def from_json(cls, text: str, move: str) -> MoveFacts:
        """Return the facts of a stored row.

        Args:
            text: the JSON value.
            move: its name.

        Raises:
            StatementError: a fact is missing, is not known, or has a value that is not understood.
        """
        stored, facts = json.loads(text), dict[str, Any]()
        for name, read in _READERS.items():
            try:
                facts[name] = read(stored.pop(name))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                remedy = Remedy(
                    "correct its value, which the comment of the column describes. To see the row",
                    migrations.show_facts(sql_literal(move)),
                )
                detail = f"The value of fact {sql_literal(name)} is missing or has another type."
                raise _misunderstood(move, detail, remedy) from error
        for name in stored:
            remedy = Remedy(
                "use the version of the program that has begun the move. Or, if the fact was added by hand",
                migrations.drop_fact(sql_literal(move), sql_literal(name)),
            )
            raise _misunderstood(move, f"Fact {sql_literal(name)} is not known.", remedy)
        return cls(**facts)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a string")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError("not an array")
    return tuple(map(_text, value))


def _oids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(oid) is int for oid in value):
        raise TypeError("not an array of numbers")
    return tuple(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("not a boolean")
    return value


def _grant(value: Any) -> Grant:
    role, grantable = value
    return Grant(None if role is None else _text(role), _flag(grantable))


def _fence(value: Any) -> ClosedFence | None:
    return None if value is None else ClosedFence(tuple(map(_grant, value["grants"])), _texts(value["kept"]))


def _stopped(value: Any) -> StoppedSubscription | None:
    return None if value is None else StoppedSubscription(Lsn.parse(value["at"]), _text(value["slot"]))


_READERS: Mapping[str, Callable[[Any], object]] = {
    "side": Side,
    "fence": _fence,
    "stopped": _stopped,
    "held": _flag,
    "redirect": _flag,
    "publications": _oids,
}


def _misunderstood(move: str, detail: str, remedy: Remedy) -> StatementError:
    message = f"the row of move {sql_literal(move)} is not understood"
    return StatementError(message, detail=detail, hint=remedy, sqlstate=DATA_CORRUPTED)


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """The row of a move on one server: where it stands, as far as this server knows, and the facts."""

    standing: Standing
    facts: MoveFacts


Change: TypeAlias = Callable[[MoveFacts], MoveFacts]


def unchanged(facts: MoveFacts) -> MoveFacts:
    """Return the facts as they are."""
    return facts


async def load(connection: asyncpg.Connection, name: str) -> ServerRecord | None:
    """Return the row of a move, or None if the server has none.

    Raises:
        StatementError: the row is not understood.
    """
    row = await migrations.load(connection, name)
    if row is None:
        return None
    return ServerRecord(Standing(Side(row.serving), Phase(row.phase)), MoveFacts.from_json(row.facts, name))


async def save(
    connection: asyncpg.Connection, name: str, side: Side, standing: Standing, change: Change = unchanged
) -> None:
    """Store where a move stands.

    Args:
        connection: in a transaction, of the session that has the lock of the move.
        name: of the move.
        side: of the server. A new row gets it.
        standing: of the move.
        change: returns the facts to store, from those of the row.
    """
    known = await load(connection, name)
    facts = change(MoveFacts(side) if known is None else known.facts)
    await migrations.save(connection, name, standing.serving, standing.phase, facts.as_json())


async def created_publications(connection: asyncpg.Connection) -> set[str]:
    """Return the names of the publications that moves have created in a database.

    Raises:
        StatementError: a row of a move is not understood.
    """
    rows = await migrations.load_facts(connection)
    return set(await publication_names(connection, *(MoveFacts.from_json(text, name) for name, text in rows)))


async def publication_names(connection: asyncpg.Connection, *facts: MoveFacts) -> list[str]:
    """Return the present names of the publications that moves have created, of those that exist."""
    oids = [oid for move in facts for oid in move.publications]
    return [row["name"] for row in await connection.fetch(PUBLICATION_NAMES, oids)]


def refuse_other_side(facts: MoveFacts, side: Side, name: str) -> None:
    """Refuse a server that has the other side of a move.

    Args:
        facts: of the server's row.
        side: the side for which the server was given.
        name: of the move.

    Raises:
        StatementError: the connection strings are exchanged.
    """
    if facts.side is not side:
        raise StatementError(
            f"the {side} of this command is the {side.other} of the move {name}",
            hint="Exchange --source and --target. For another move, choose another name.",
            sqlstate=INVALID_PARAMETER_VALUE,
        )
