"""Read the definitions of all tables of a subscription soon after its worker has started, in a separate session.

Otherwise the first transaction that changes many tables would have to wait until their definitions are read.
"""

from __future__ import annotations

from collections.abc import Iterable

import anyio

from subscriber.apply.progress import Progress
from subscriber.connection.connect import open_session
from subscriber.connection.conninfo import Conninfo
from subscriber.connection.pipeline import Pipeline
from subscriber.errors import MappingError, SubscriberError
from subscriber.targets.postgres.session.introspection import Terms, introspect
from subscriber.targets.postgres.session.known_tables import KnownTables

# Planning the queries again for each table would take longer than running them.
SETTINGS = {"plan_cache_mode": "force_generic_plan"}


async def wait_for_pause(progress: Progress, pause: float, timeout: float) -> None:
    """Wait until the position of the stream stays the same for `pause` seconds, and for at most `timeout` seconds."""
    last = None
    with anyio.move_on_after(timeout):
        while last != (last := progress.position):
            await anyio.sleep(pause)


async def look_ahead(
    conninfo: Conninfo | str, name: str, tables: Iterable[tuple[str, str]], terms: Terms, known: KnownTables
) -> None:
    """Read the definitions of `tables` and add them to `known`.

    Tables that cannot be a target are skipped. If the session cannot be opened or is lost, the rest is skipped. The
    worker reports the reason when a change needs such a table.

    Args:
        conninfo: the connection string of the role that applies changes.
        name: the name of the subscription.
        tables: schema and name of each table.
        terms: the role and rules that the definitions are valid for.
        known: the definitions that the worker has already.
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
