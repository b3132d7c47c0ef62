"""Statements on `subscriber.subscription_sequence`: the sequences of each subscription and their states."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

import asyncpg

from subscriber.lsn import Lsn, optional_lsn
from subscriber.publisher.sequences import SequenceValue

SEQUENCES = """
SELECT q.nspname::text, q.seqname::text, q.state::text, q.lsn::text, q.problem
  FROM subscriber.subscription_sequence q WHERE q.subid = $1 ORDER BY q.nspname, q.seqname
"""
ADD = """
INSERT INTO subscriber.subscription_sequence (subid, nspname, seqname, state)
SELECT $1::oid, t.schema, t.name, $4::text::"char" FROM unnest($2::text[], $3::text[]) AS t (schema, name)
ON CONFLICT DO NOTHING
"""
REMOVE = """
DELETE FROM subscriber.subscription_sequence q USING unnest($2::text[], $3::text[]) AS t (schema, name)
 WHERE q.subid = $1 AND q.nspname = t.schema AND q.seqname = t.name
"""
RESET = """
UPDATE subscriber.subscription_sequence SET state = 'i', lsn = NULL WHERE subid = $1
"""
SET_VALUE = """
SELECT subscriber.set_sequence($1::oid, $2::text::name, $3::text::name, $4::bigint, $5::boolean, $6::oid, $7::bigint,
                               $8::bigint, $9::bigint, $10::bigint, $11::boolean, $12::boolean)
"""
SET_READY = """
UPDATE subscriber.subscription_sequence SET state = 'r', lsn = $4::text::pg_lsn, problem = NULL
 WHERE subid = $1 AND nspname = $2::text::name AND seqname = $3::text::name
"""
SET_PROBLEM = """
UPDATE subscriber.subscription_sequence SET problem = $4::text
 WHERE subid = $1 AND nspname = $2::text::name AND seqname = $3::text::name AND problem IS DISTINCT FROM $4::text
"""
LAST_VALUES = """
SELECT s.schemaname::text, s.sequencename::text, s.last_value
  FROM pg_catalog.pg_sequences s JOIN unnest($1::text[], $2::text[]) AS w (schema, name)
    ON s.schemaname = w.schema AND s.sequencename = w.name
"""
LOCAL = """
SELECT w.schema, w.name, c.relkind::text AS relkind
  FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS w (schema, name, number)
  LEFT JOIN (pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace)
    ON n.nspname = w.schema AND c.relname = w.name
 ORDER BY w.number
"""


class SetOutcome(StrEnum):
    """The result of subscriber.set_sequence()."""

    SET = "set"
    AHEAD = "ahead"  # the target's value is as far as the requested one, which was not set
    DROPPED = "dropped"  # the target has no sequence of the name
    MISMATCHED = "mismatched"  # the definitions differ
    DENIED = "denied"  # the role that acts may not change the sequence


@dataclass(frozen=True, slots=True)
class SubscriptionSequence:
    """One sequence of a subscription."""

    schema: str
    name: str
    state: str  # i or r
    lsn: Lsn | None  # the publisher's position of the value; None until the sequence is ready
    problem: str | None  # the reason why the last synchronization failed


async def load_sequences(connection: asyncpg.Connection, subid: int) -> list[SubscriptionSequence]:
    """Return the sequences of a subscription, ordered by schema and name."""
    return [
        SubscriptionSequence(schema, name, state, optional_lsn(lsn), problem)
        for schema, name, state, lsn, problem in await connection.fetch(SEQUENCES, subid)
    ]


async def add_sequences(
    connection: asyncpg.Connection, subid: int, names: Sequence[tuple[str, str]], state: str
) -> None:
    """Add sequences to the subscription. Those that it has keep their states."""
    await connection.execute(ADD, subid, *_split(names), state)


async def remove_sequences(connection: asyncpg.Connection, subid: int, names: Collection[tuple[str, str]]) -> None:
    """Remove sequences from the subscription. The sequences themselves stay as they are."""
    await connection.execute(REMOVE, subid, *_split(names))


async def reset_sequences(connection: asyncpg.Connection, subid: int) -> None:
    """Have all sequences of the subscription synchronized again."""
    await connection.execute(RESET, subid)


async def set_value(
    connection: asyncpg.Connection, subid: int, name: tuple[str, str], value: SequenceValue, *, ahead: bool
) -> SetOutcome:
    """Set a sequence of the target.

    Args:
        connection: A connection to the target.
        subid: The subscription, whose owner needs the privilege.
        name: Schema and name of the sequence.
        value: The value to set, and the definition that the sequence must have.
        ahead: Set the value only if it is further than the target's, in the direction of the increment.

    Returns:
        The outcome: set, left alone, or the reason why not.
    """
    definition = value.definition
    outcome = await connection.fetchval(
        SET_VALUE,
        subid,
        *name,
        value.last_value,
        value.is_called,
        definition.type_oid,
        definition.start,
        definition.increment,
        definition.least,
        definition.greatest,
        definition.cycles,
        ahead,
    )
    return SetOutcome(outcome)


async def set_ready(connection: asyncpg.Connection, subid: int, name: tuple[str, str], lsn: Lsn) -> None:
    """Store that a sequence is synchronized."""
    await connection.execute(SET_READY, subid, *name, str(lsn))


async def set_problem(connection: asyncpg.Connection, subid: int, name: tuple[str, str], problem: str) -> None:
    """Store the reason why a sequence is not synchronized."""
    await connection.execute(SET_PROBLEM, subid, *name, problem)


async def load_last_values(
    connection: asyncpg.Connection, names: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], int | None]:
    """Return the last value of each sequence of the target that exists. None: nextval() has not been called."""
    rows = await connection.fetch(LAST_VALUES, *_split(names))
    return {(schema, name): last_value for schema, name, last_value in rows}


async def load_local_kinds(
    connection: asyncpg.Connection, names: Sequence[tuple[str, str]]
) -> list[tuple[tuple[str, str], str | None]]:
    """Return each name with the relkind of the target's relation, or None if there is none."""
    rows = await connection.fetch(LOCAL, *_split(names))
    return [((row["schema"], row["name"]), row["relkind"]) for row in rows]


def _split(names: Collection[tuple[str, str]]) -> tuple[list[str], list[str]]:
    return [schema for schema, _ in names], [name for _, name in names]
