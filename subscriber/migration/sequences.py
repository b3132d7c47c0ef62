"""Sequences of the serving server, and their advance on the following one while both are fenced."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import asyncpg

from subscriber.connection.settings import READ_NO_VIEW
from subscriber.quoting import literal, qualified

# All but temporary ones and those of the system.
NAMES = """
SELECT n.nspname::text AS schema, c.relname::text AS name, s.seqincrement AS increment, s.seqmin AS least,
       s.seqmax AS greatest, pg_catalog.has_sequence_privilege(c.oid, 'SELECT') AS readable,
       pg_catalog.has_sequence_privilege(c.oid, 'UPDATE') AS writable
  FROM pg_catalog.pg_sequence s JOIN pg_catalog.pg_class c ON c.oid = s.seqrelid
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relpersistence <> 't' AND n.nspname NOT IN ('subscriber', 'pg_catalog', 'information_schema')
 ORDER BY 1, 2
"""
BATCH_SIZE = 200  # sequences that one query reads
SET = """
SELECT pg_catalog.setval(n.name::pg_catalog.regclass, n.value, n.called)
  FROM unnest($1::text[], $2::bigint[], $3::boolean[]) AS n (name, value, called)
"""


def set_statement(name: str, value: int, called: bool) -> str:
    """Return the statement that has the effect of set_values() on one sequence. `name` is quoted."""
    return f"SELECT pg_catalog.setval({literal(name)}, {value}, {str(called).lower()})"


@dataclass(frozen=True, slots=True)
class SequenceState:
    """A sequence of one server. `value` and `called` are None before they are read."""

    schema: str
    name: str
    increment: int
    least: int
    greatest: int
    readable: bool
    writable: bool
    value: int = 0
    called: bool = False

    @property
    def quoted(self) -> str:
        """The name for SQL."""
        return qualified(self.schema, self.name)


async def list_sequences(connection: asyncpg.Connection) -> list[SequenceState]:
    """Return the sequences of a database without their values."""
    return [SequenceState(**dict(row)) for row in await connection.fetch(NAMES)]


async def read_values(
    connection: asyncpg.Connection, sequences: Iterable[SequenceState]
) -> dict[str, tuple[int, bool]]:
    """Return last_value and is_called of each sequence, by its quoted name."""
    names = [sequence.quoted for sequence in sequences]
    values: dict[str, tuple[int, bool]] = {}
    for start in range(0, len(names), BATCH_SIZE):
        part = names[start : start + BATCH_SIZE]
        query = " UNION ALL ".join(
            f"SELECT {place}, last_value, is_called FROM {name}" for place, name in enumerate(part)
        )
        async with connection.transaction():
            await connection.execute(READ_NO_VIEW)
            values |= {part[place]: (value, called) for place, value, called in await connection.fetch(query)}
    return values


def obstacles(serving: Iterable[SequenceState], following: Iterable[SequenceState]) -> list[str]:
    """Return sentences about sequences that could not be advanced."""
    there = {sequence.quoted: sequence for sequence in following}
    problems = []
    for sequence in serving:
        if not sequence.readable:
            problems.append(f"Sequence {sequence.quoted} of the serving server cannot be read: SELECT is needed.")
        if sequence.quoted not in there:
            problems.append(f"Sequence {sequence.quoted} does not exist on the following server.")
        elif not there[sequence.quoted].writable:
            problems.append(f"Sequence {sequence.quoted} of the following server cannot be set: UPDATE is needed.")
    return problems


def advances(
    sequences: Iterable[SequenceState],
    serving: dict[str, tuple[int, bool]],
    following: dict[str, tuple[int, bool]],
    margin: int = 0,
) -> list[tuple[str, int, bool]]:
    """Return the sequences to set on the following server: name, value and is_called.

    The value that is further in the direction of the increment wins, so no sequence moves backwards.

    Args:
        sequences: of the serving server.
        serving: its values.
        following: the values of the following server.
        margin: increments to add to the serving server's value.
    """
    wanted = []
    for sequence in sequences:
        value, called = serving[sequence.quoted]
        if margin:
            value = max(sequence.least, min(sequence.greatest, value + margin * sequence.increment))
        own, own_called = following[sequence.quoted]
        direction = 1 if sequence.increment > 0 else -1
        if (value * direction, called) > (own * direction, own_called):
            wanted.append((sequence.quoted, value, called))
    return wanted


async def set_values(connection: asyncpg.Connection, values: list[tuple[str, int, bool]]) -> None:
    """Set sequences, in one transaction."""
    if values:
        names, numbers, called = zip(*values, strict=True)
        await connection.fetch(SET, list(names), list(numbers), list(called))
