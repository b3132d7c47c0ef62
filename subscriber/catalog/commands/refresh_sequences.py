"""The sequences of a subscription: CREATE SUBSCRIPTION and REFRESH PUBLICATION add and remove them.

Source: fetch_relation_list() and AlterSubscription_refresh() in src/backend/commands/subscriptioncmds.c.
"""

from __future__ import annotations

import asyncpg

from subscriber import server_features as features
from subscriber.catalog.commands.publisher_connection import Notice
from subscriber.catalog.store.subscription_sequence import (
    add_sequences,
    load_local_kinds,
    load_sequences,
    remove_sequences,
)
from subscriber.errors import StatementError
from subscriber.publisher.connection import Publisher
from subscriber.sqlstate import UNDEFINED_TABLE, WRONG_OBJECT_TYPE
from subscriber.subscription import SequenceMode, Subscription

SEQUENCE = "S"  # pg_class.relkind


async def add(
    connection: asyncpg.Connection,
    subid: int,
    publisher: Publisher,
    publications: tuple[str, ...],
    notice: Notice,
    *,
    mode: SequenceMode,
    more: tuple[tuple[str, str], ...],
    copy_data: bool,
) -> set[tuple[str, str]]:
    """Add the sequences of the publications and those of the option `sequence_names`.

    New ones are to be synchronized (state i), or without `copy_data` ready (r). The publication of a server since 19
    names its sequences, so each must exist on the target. An older one only implies the sequences of its columns: one
    that the target lacks is not needed there.

    Returns:
        The sequences that the subscription should have.

    Raises:
        StatementError: The target lacks a sequence that is published or named, or has another relation of that name.
    """
    if mode is SequenceMode.NONE:
        return set()
    published = await publisher.sequences(publications)
    names = list(dict.fromkeys([*published, *more]))
    implied = set(published) - set(more) if not features.PUBLISHED_SEQUENCES.is_in(publisher.server_version) else set()
    wanted: list[tuple[str, str]] = []
    for (schema, name), relkind in await load_local_kinds(connection, names):
        if relkind == SEQUENCE:
            wanted.append((schema, name))
        elif (schema, name) in implied:
            continue
        elif relkind is None:
            raise StatementError(f'relation "{schema}.{name}" does not exist', sqlstate=UNDEFINED_TABLE)
        else:
            raise StatementError(f'"{schema}.{name}" is not a sequence', sqlstate=WRONG_OBJECT_TYPE)
    known = {(sequence.schema, sequence.name) for sequence in await load_sequences(connection, subid)}
    new = [name for name in wanted if name not in known]
    await add_sequences(connection, subid, new, "i" if copy_data else "r")
    if new and copy_data and not features.PUBLISHED_SEQUENCES.is_in(publisher.server_version):
        labels = ", ".join(f'"{schema}.{name}"' for schema, name in new)
        noun = "sequence" if len(new) == 1 else "sequences"
        notice(
            "NOTICE",
            f"{noun} of published columns will be set to the publisher's values: {labels}",
            None,
            "Use sequences = none to leave sequences as they are.",
        )
    return set(wanted)


async def refresh(
    connection: asyncpg.Connection,
    subscription: Subscription,
    publisher: Publisher,
    publications: tuple[str, ...],
    notice: Notice,
    *,
    copy_data: bool,
) -> None:
    """Make the subscription's sequences those of `publications` and of the option `sequence_names`."""
    wanted = await add(
        connection,
        subscription.oid,
        publisher,
        publications,
        notice,
        mode=subscription.sequences,
        more=subscription.sequence_names,
        copy_data=copy_data,
    )
    known = {(sequence.schema, sequence.name) for sequence in await load_sequences(connection, subscription.oid)}
    await remove_sequences(connection, subscription.oid, known - wanted)
