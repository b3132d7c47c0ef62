"""Reads values of a published row that the publisher does not send, because a change has left them as they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import anyio

from subscriber.errors import ConnectionLost
from subscriber.protocol.messages import Relation
from subscriber.publisher.connection import Publisher
from subscriber.quoting import identifier, literal, qualified

ANSWER_TIMEOUT = 10.0  # seconds; the reader holds locks on the target


async def read_values(
    publisher: Publisher, relation: Relation, key: Mapping[str, str], columns: Sequence[str]
) -> dict[str, str | None] | None:
    """Return the present values of a row as texts by column, or None if there is no such row.

    Args:
        publisher: a session that does not stream.
        relation: the published table.
        key: the row's key by column, as texts.
        columns: the columns to read.

    Raises:
        ServerError: the publisher refuses the query, for example because the role lacks SELECT.
        ConnectionLost: the connection broke, or there is no answer in time.
    """
    selected = ", ".join(f"{identifier(name)}::pg_catalog.text" for name in columns)
    where = " AND ".join(f"{identifier(name)} = {literal(value)}" for name, value in key.items())
    sql = f"SELECT {selected} FROM {qualified(relation.schema, relation.name)} WHERE {where} LIMIT 1"
    try:
        with anyio.fail_after(ANSWER_TIMEOUT):
            await publisher.restrict_views()
            rows = await publisher.session.rows(sql)
    except TimeoutError:
        message = f'the publisher has not answered a query of table "{relation.schema}.{relation.name}"'
        raise ConnectionLost(f"{message} within {ANSWER_TIMEOUT:g} seconds") from None
    return dict(zip(columns, rows[0], strict=True)) if rows else None
