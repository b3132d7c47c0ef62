"""The tables of a subscription that have hooks of the program that runs it, in the catalog.

They are stored for two reasons. A hook may give a table another name, and the rows that a table receives are decided
when it becomes part of the subscription. And a masked value must not arrive unmasked because a program without hooks
runs the subscription: such a program is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from subscriber.apply.hooks.config import Hooks, Name
from subscriber.apply.hooks.table_hook import needs_text
from subscriber.catalog.connection import Connection
from subscriber.catalog.store.subscription_rel import SubscriptionRel
from subscriber.errors import HookError, HooksMissing
from subscriber.subscription import Subscription

_SOURCES = """
SELECT r.srrelid, r.srsource FROM subscriber.subscription_rel r WHERE r.srsubid = $1 AND r.srsource IS NOT NULL
"""
_SET_SOURCE = "UPDATE subscriber.subscription_rel SET srsource = $3::text[] WHERE srsubid = $1 AND srrelid = $2"

Sources = dict[int, Name]  # OID on the target -> schema and name on the publisher, of tables that have hooks


async def sources(connection: Connection, subid: int) -> Sources:
    """The tables with hooks."""
    return {row["srrelid"]: tuple(row["srsource"]) for row in await connection.fetch(_SOURCES, subid)}


async def set_source(connection: Connection, subid: int, relid: int, source: Name | None) -> None:
    """Store that a table has hooks; None: that it has none any more."""
    await connection.execute(_SET_SOURCE, subid, relid, None if source is None else list(source))


async def record(connection: Connection, subid: int, tables: Sequence[SubscriptionRel], hooks: Hooks | None) -> Sources:
    """Store which of the subscription's `tables` have hooks, if this program is one that has some; which they are."""
    known = await sources(connection, subid)
    if hooks is None:
        return known
    for table in tables:
        here = (table.namespace, table.name)
        source = known.get(table.relid, here)
        if hooks.target(*source) != here:  # check() reports it
            continue
        if hooks.find(*source) is None and known.pop(table.relid, None) is not None:
            await set_source(connection, subid, table.relid, None)
        elif hooks.find(*source) is not None and table.relid not in known:
            await set_source(connection, subid, table.relid, source)
            known[table.relid] = source
    return known


def check(subscription: Subscription, tables: Sequence[SubscriptionRel], found: Sources, hooks: Hooks | None) -> None:
    """Raises HookError where hooks and tables do not go together. `found` is what record() gave."""
    name = subscription.name
    if hooks is None:
        if found:
            raise HooksMissing(
                f'subscription "{name}" has hooks, and this program has none for it',
                detail=f"Tables with hooks: {', '.join(sorted('.'.join(source) for source in found.values()))}.",
                hint="Run it in the program that has them, or give that one Hooks() to do without from now on.",
            )
        return
    published = {found.get(table.relid, (table.namespace, table.name)) for table in tables}
    if unknown := sorted(hooks.tables.keys() - published):
        raise HookError(
            f'hooks of subscription "{name}" name a table that is not part of it: "{".".join(unknown[0])}"',
            hint="Correct the name, or ALTER SUBSCRIPTION … REFRESH PUBLICATION.",
        )
    for table in tables:
        here = (table.namespace, table.name)
        source = found.get(table.relid, here)
        if hooks.target(*source) != here:
            raise HookError(
                f'table "{".".join(here)}" takes the rows of "{".".join(source)}", which the hooks send to '
                f'"{".".join(hooks.target(*source))}"',
                detail="Which table takes them is decided when a table becomes part of the subscription.",
                hint="Create the subscription anew, with the hooks that it is to have.",
            )
        hook = hooks.find(*source)
        if hook is not None and hook.reads_values and subscription.binary:
            raise needs_text(".".join(source))
