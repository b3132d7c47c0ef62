"""A role with duty launcher, or owner, has functions of the schema end sessions that are not its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import pytest

from subscriber.catalog import worker_sessions
from subscriber.catalog.worker_sessions import Backend
from tests.privileges.conftest import APPLY, OTHER, OWNER, Attacked
from tests.privileges.test_owner_of_a_subscription import OWN, SUBSCRIPTION, VICTIM


@pytest.fixture
async def launchers(attacked: Attacked) -> AsyncIterator[Attacked]:
    """Two roles with duty launcher and a subscription each."""
    await attacked.subscriber.stop()
    await attacked.target.execute(
        f"SELECT subscriber.admit('{OWNER}', 'launcher'), subscriber.admit('{OTHER}', 'launcher')",
        SUBSCRIPTION.format(subid=VICTIM, owner=OTHER, password="own"),
        SUBSCRIPTION.format(subid=OWN, owner=OWNER, password="own"),
    )
    yield attacked
    await attacked.target.execute("DELETE FROM subscriber.subscription")


async def session_of(attacked: Attacked, role: str) -> asyncpg.Connection[asyncpg.Record]:
    connection: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(attacked.target.dsn(user=role))
    return connection


@pytest.mark.parametrize("victim", ["postgres", OTHER, APPLY])
async def test_no_launcher_ends_a_session_that_is_not_of_its_subscriptions(launchers: Attacked, victim: str) -> None:
    """Also one that has registered itself, for another subscription."""
    session, attacker = await session_of(launchers, victim), await session_of(launchers, OWNER)
    try:
        backend = await Backend.of(session)
        await session.execute(worker_sessions.REGISTER_OWN_SESSION, VICTIM)
        for name in ("one", "two"):
            await worker_sessions.lead(attacker, name, backend, 0)
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="has not registered itself"):
            await worker_sessions.register(attacker, OWN, 0, backend)
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="permission denied for subscription"):
            await worker_sessions.register(attacker, VICTIM, 0, backend)
        await worker_sessions.terminate(attacker, OWN, None)
        await worker_sessions.terminate_session(attacker, OWN, backend.pid)
        assert await session.fetchval("SELECT 1") == 1
        await session.execute(worker_sessions.REGISTER_OWN_SESSION, OWN)  # its worker now
        assert await worker_sessions.register(attacker, OWN, 0, backend) is None
        assert await worker_sessions.terminate(attacker, OWN, None) == 1
    finally:
        session.terminate()
        await worker_sessions.resign(attacker, "two", (await Backend.of(attacker)).pid)
        await attacker.close()


async def test_a_place_is_of_the_session_that_has_registered_itself(launchers: Attacked) -> None:
    """Not of one with its process ID that began at another time."""
    session, attacker = await session_of(launchers, APPLY), await session_of(launchers, OWNER)
    backend, own = await Backend.of(session), await Backend.of(attacker)
    await session.execute(worker_sessions.REGISTER_OWN_SESSION, OWN)
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="has not registered itself"):
        await worker_sessions.register(attacker, OWN, 0, Backend(backend.pid, own.started))
    await session.close()
    await attacker.close()
