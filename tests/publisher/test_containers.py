"""Publishers of several major versions from their official images, if Docker runs."""

from __future__ import annotations

import shutil
import subprocess
import warnings
from collections.abc import Iterator

import pytest

from subscriber.lsn import Lsn
from subscriber.publisher.connection import Publisher


def without_docker() -> str | None:
    """Why there are no containers; None if there are."""
    if shutil.which("docker") is None:
        return "there is no docker command"
    asked = subprocess.run(["docker", "info"], capture_output=True, text=True, timeout=20, check=False)
    return None if asked.returncode == 0 else f"Docker does not answer: {asked.stderr.strip()}"


@pytest.fixture(scope="module", params=["14", "15", "16", "17", "18"])
def container(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the connection string of a publisher of that major version."""
    if reason := without_docker():
        pytest.skip(reason)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about decorators of its own
        from testcontainers.postgres import PostgresContainer

        server = PostgresContainer(f"postgres:{request.param}-alpine", driver=None)
        with server.with_command("postgres -c wal_level=logical") as started:
            yield started.get_connection_url()


async def test_slots_and_publications_of_each_major(container: str) -> None:
    publisher = await Publisher.connect(container, application_name="s")
    try:
        assert (await publisher.identify_system()).position > Lsn(0)
        await publisher.session.query("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
        assert await publisher.tables(["p"]) == [("public", "t")]
        created = await publisher.create_slot("s", snapshot="nothing", temporary=True)
        slot = await publisher.slot("s")
        assert slot is not None
        assert slot.confirmed_flush == created.consistent_point
    finally:
        await publisher.close()
