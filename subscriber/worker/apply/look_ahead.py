"""A look at all tables of a subscription when its worker starts, in a session of its own that ends afterwards.

Else the first transaction that changes many tables would wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import anyio

from subscriber.connection.connect import open_session
from subscriber.connection.pipeline import Pipeline
from subscriber.errors import MappingError, SubscriberError
from subscriber.lsn import Lsn
from subscriber.targets.postgres.session.introspection import Terms, introspect
from subscriber.targets.postgres.session.known_tables import KnownTables

SETTINGS = {"plan_cache_mode": "force_generic_plan"}  # a plan for each table would take longer than what it finds


async def wait_for_pause(position: Callable[[], Lsn], pause: float, timeout: float) -> None:
    """Wait until the worker's position stays the same for `pause` seconds, and for at most `timeout` seconds."""
    last = None
    with anyio.move_on_after(timeout):
        while last != (last := position()):
            await anyio.sleep(pause)


async def look_ahead(
    conninfo: str, name: str, tables: Iterable[tuple[str, str]], terms: Terms, known: KnownTables
) -> None:
    """Add `tables`, each a schema and a name, to `known`.

    Args:
        conninfo: of the role that applies changes.
        name: of the subscription.

    A table that cannot be a target is left out, and so is the rest when the session is lost: the worker tells why when
    a change needs it.
    """
    try:
        session = await open_session(conninfo, application_name=f"subscriber: {name} tables", settings=SETTINGS)
    except SubscriberError:
        return
    try:
        pipeline = Pipeline(session)
        for schema, table in tables:
            if known.find(schema, table, terms) is None:
                try:
                    known.add(await introspect(pipeline, schema, table, terms), terms)
                except MappingError:
                    continue
    except SubscriberError:
        return
    finally:
        session.abort()
