"""Which subscriptions write to the tables of a subscription, and which rows belong to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import asyncpg

from subscriber.errors import StatementError
from subscriber.ownership import OwnershipRules, Table, TableOwnership, TableWriter, parse_ownership
from subscriber.subscription import Subscription

# A role without superuser sees its own subscriptions, and those of PostgreSQL.
_WRITERS = """
WITH shared (relid) AS (
     SELECT $1::pg_catalog.oid
     UNION SELECT a.relid FROM pg_catalog.pg_partition_ancestors($1::pg_catalog.oid::pg_catalog.regclass) a
     UNION SELECT t.relid FROM pg_catalog.pg_partition_tree($1::pg_catalog.oid::pg_catalog.regclass) t)
SELECT s.subname::pg_catalog.text
  FROM subscriber.subscription_rel r JOIN subscriber.subscription s ON s.subid = r.srsubid
 WHERE r.srrelid IN (SELECT relid FROM shared)
 UNION
SELECT s.subname::pg_catalog.text FROM pg_catalog.pg_subscription_rel r
  JOIN pg_catalog.pg_stat_subscription s ON s.subid = r.srsubid
 WHERE r.srrelid IN (SELECT relid FROM shared)
 ORDER BY 1
"""


@dataclass(frozen=True, slots=True)
class SubscriptionOwnership:
    """The ownership of all tables of a subscription.

    Attributes:
        rules: the rules of the subscription.
        others: by OID of the table on the target, the other subscriptions with rows in it.
    """

    rules: OwnershipRules
    others: dict[int, tuple[TableWriter, ...]]

    def of(self, relid: int, table: Table) -> TableOwnership:
        """Return the ownership of a table. `table`: its schema and name on the target."""
        return TableOwnership(self.rules.rule(table), self.others.get(relid, ()))


async def load_ownership(connection: asyncpg.Connection, subscription: Subscription) -> SubscriptionOwnership:
    """Read which other subscriptions have rows in tables of a subscription."""
    return as_ownership(subscription, await connection.fetch(writers_query(subscription)))


def writers_query(subscription: Subscription) -> str:
    """Return the query without parameters whose rows as_ownership() reads."""
    columns = "relid::pg_catalog.text, writer, native::pg_catalog.text, sourcetag, nspname, relname"
    return f"SELECT {columns} FROM subscriber.other_writers({subscription.oid})"


def as_ownership(subscription: Subscription, rows: Iterable[Iterable[Any]]) -> SubscriptionOwnership:
    """Return the ownership of the tables of a subscription. `rows`: of writers_query()."""
    others = defaultdict[int, list[TableWriter]](list)
    for row in rows:
        relid, writer, is_native, tag, schema, name = (value or "" for value in row)
        rule = _rules_of_another(tag).rule((schema, name))
        others[int(relid)].append(TableWriter(writer, is_native == "true", rule, (schema, name)))
    return SubscriptionOwnership(subscription.ownership, {relid: tuple(writers) for relid, writers in others.items()})


def _rules_of_another(tag: str) -> OwnershipRules:
    """Return the rules of another subscription. Its owner may write any text into the catalog, which is no rule."""
    try:
        return parse_ownership(tag)
    except StatementError:
        return OwnershipRules()


async def load_writers(connection: asyncpg.Connection, relid: int) -> list[str]:
    """Return the subscriptions that write to a table of the target, as far as the role sees them."""
    return [row[0] for row in await connection.fetch(_WRITERS, relid)]
