"""The servers of these tests are Debian's PostgreSQL 15.

If it is unavailable, the tests are skipped with the reason.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from anyio.from_thread import BlockingPortal

from subscriber.demo.servers import Server, Servers
from tests.matrix.debian import debian
from tests.matrix.programs import NotAvailable
from tests.plugins.fix_cluster import SETTINGS, Database
from tests.plugins.fix_subscriber import Subscriber
from tests.scenarios.conftest import Pair


@pytest.fixture(scope="session")
def vendor_bin() -> Path:
    """Return the directory of the programs."""
    try:
        return debian(15)
    except NotAvailable as reason:
        pytest.skip(f"no PostgreSQL 15 of Debian: {reason}")


def _start(portal: BlockingPortal, servers: Servers, name: str, bin: Path) -> Server:
    async def start() -> Server:
        server = await servers.create(name, SETTINGS, bin=bin)
        await server.start()
        return server

    return portal.call(start)


@pytest.fixture(scope="session")
def publisher(portal: BlockingPortal, session_servers: Servers, vendor_bin: Path) -> Server:
    return _start(portal, session_servers, "vendor publisher", vendor_bin)


@pytest.fixture(scope="session")
def target(portal: BlockingPortal, session_servers: Servers, vendor_bin: Path) -> Server:
    return _start(portal, session_servers, "vendor target", vendor_bin)


@pytest.fixture
def pair(source_db: Database, target_db: Database, subscriber: Subscriber) -> Pair:
    return Pair(source_db, target_db, subscriber)
