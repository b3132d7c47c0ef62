"""A publisher that stops requiring passwords gets no connection of a subscription that must use one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest

from subscriber.catalog.store.subscriptions import find_subscription
from subscriber.check.check import collect
from subscriber.comparison.comparison import verify
from subscriber.demo.servers import Server, Servers
from subscriber.errors import SubscriberError
from subscriber.status.collect import ask_publisher
from subscriber.subscription import Subscription
from tests.plugins.fix_cluster import SETTINGS, Database
from tests.plugins.fix_subscriber import Subscriber

LOGGED = {"log_statement": "all", "log_replication_commands": "on", "log_line_prefix": "%u: "}
REFUSED = ("password is required", "Non-superuser cannot connect if the server does not request a password.")
SAID = ("statement:", "execute ", "received replication command:")


@dataclass
class Scene:
    publisher: Server
    target: Database
    subscriber: Subscriber
    subscription: Subscription

    async def authenticate(self, method: str) -> None:
        """Have the publisher authenticate role `app` so, in new connections."""
        (self.publisher.data / "pg_hba.conf").write_text(
            f"host all app 127.0.0.1/32 {method}\nhost all all 127.0.0.1/32 trust\n"
        )
        await self.publisher.restart()

    def statements(self) -> list[str]:
        """Return the statements of role `app` on the publisher."""
        lines = self.publisher.log.read_text().splitlines()
        return [line for line in lines if line.startswith("app: ") and any(word in line for word in SAID)]


@pytest.fixture
async def scene(servers: Servers, target_db: Database, subscriber: Subscriber) -> AsyncIterator[Scene]:
    publisher = await servers.create("publisher", {**SETTINGS, **LOGGED})
    await publisher.start()
    source = Database(publisher, "postgres")
    await source.execute(
        "CREATE ROLE app LOGIN SUPERUSER PASSWORD 'secret'",
        "CREATE TABLE t (id int PRIMARY KEY)",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    await target_db.execute("CREATE ROLE plain_owner", "CREATE TABLE t (id int PRIMARY KEY)")
    dsn = publisher.dsn(user="app", password="secret")
    await subscriber.create(dsn, "p", copy_engine="snapshot")
    await subscriber.wait_for_ready(source)
    await subscriber.stop()
    await target_db.execute("UPDATE subscriber.subscription SET subowner = 'plain_owner'::regrole")
    async with target_db.connection() as connection:
        subscription = await find_subscription(connection, "s")
    assert subscription is not None
    assert subscription.must_use_password
    try:
        yield Scene(publisher, target_db, subscriber, subscription)
        await subscriber.stop()
    finally:
        await target_db.execute(
            "UPDATE subscriber.subscription SET subowner = 'postgres'::regrole", "DROP ROLE plain_owner"
        )


@pytest.mark.parametrize("method", ["scram-sha-256", "trust"])
async def test_every_connection_uses_the_password(scene: Scene, method: str) -> None:
    await scene.authenticate(method)
    said = len(scene.statements())
    allowed = method != "trust"
    expected = None if allowed else REFUSED
    subscription, target = scene.subscription, scene.target.dsn()

    scene.subscriber.start()
    await scene.subscriber.wait_for_state("streaming" if allowed else "stopped")
    assert await refusal(lambda: verify(target, "s")) == expected
    assert await refusal(lambda: scene.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")) == expected
    await scene.subscriber.stop()

    answer = await ask_publisher(subscription)
    assert answer.error == (None if allowed else "password is required")
    failures = [finding.message for finding in (await collect(target, None, (), "s")).failures]
    assert failures == ([] if allowed else ["password is required"])
    assert await refusal(lambda: scene.subscriber.execute("DROP SUBSCRIPTION s")) == expected
    assert (len(scene.statements()) > said) is allowed


async def refusal(function: Callable[[], Awaitable[object]]) -> tuple[str, str | None] | None:
    """Message and detail of the error that it raises; None if it raises none."""
    try:
        await function()
    except SubscriberError as error:
        return error.message, error.detail
    return None
