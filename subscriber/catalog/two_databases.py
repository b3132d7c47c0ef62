"""open_both(): sessions on the two databases of a command."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from subscriber.catalog.connection import CatalogConnection, Connection
from subscriber.catalog.identity import refuse_same_database


@asynccontextmanager
async def open_both(source: str, target: str, application_name: str) -> AsyncIterator[tuple[Connection, Connection]]:
    """Open a session on each of two databases, and close them at the end of the block.

    Raises:
        ConnectionLost: a server cannot be reached.
        StatementError: both connection strings lead to the same database.
    """
    async with (
        CatalogConnection.open(source, application_name) as source_connection,
        CatalogConnection.open(target, application_name) as target_connection,
        source_connection.use() as there,
        target_connection.use() as here,
    ):
        await refuse_same_database(there, here)
        yield there, here
