"""The worker is killed while it parks transactions, and while it retries them: each is applied exactly once."""

from __future__ import annotations

from subscriber.failpoints import Point
from tests.faults.environment import Scene

COUNT = "SELECT count(*) FROM subscriber.quarantine"


async def test_worker_dies_at_each_place_of_parking_and_of_a_retry(faults: Scene) -> None:
    await faults.append(10)
    await faults.create_subscription(options="WITH (on_error = quarantine)")
    faults.worker.start()
    await faults.wait_until_equal()
    await faults.worker.stop()
    await faults.target.execute("ALTER TABLE log ADD CONSTRAINT poison CHECK (writer <> 9)")
    # The first attempt fails after the first COMMIT_READY, and the transaction is parked after the second one.
    places = ((Point.COMMIT_READY, 2), (Point.COMMIT_SENT, 2), (Point.COMMITTED, 1))
    for point, times in places:
        await faults.append(2, writer=9)
        await faults.append(2)
        await faults.run_into(point, times)
    faults.worker.start()
    await faults.wait_until_equal()
    await faults.worker.stop()
    assert await faults.target.value(COUNT) == 2 * len(places)
    assert await faults.target.value("SELECT count(*) FROM log") == 10
    await faults.target.execute("ALTER TABLE log DROP CONSTRAINT poison")
    await faults.execute("ALTER SUBSCRIPTION s QUARANTINE RETRY")
    for point in (Point.COMMIT_READY, Point.COMMIT_SENT):
        await faults.run_into(point)
    faults.worker.start()
    await faults.target.wait_for(COUNT, 0)
    counts = await faults.finish()
    assert counts["log"] == 10 + 4 * len(places)


async def test_quarantine_survives_a_crash_of_the_target(faults: Scene) -> None:
    await faults.create_subscription(options="WITH (on_error = quarantine)")
    faults.worker.start()
    await faults.wait_until_equal()
    await faults.target.execute("ALTER TABLE log ADD CONSTRAINT poison CHECK (writer <> 9)")
    await faults.append(2, writer=9)
    await faults.append(2)
    await faults.target.wait_for(COUNT, 2)
    await faults.worker.stop()
    # A crash leaves the tables of the schema empty, and the large objects as they are.
    await faults.target.execute(
        "TRUNCATE subscriber.complete, subscriber.quarantine, subscriber.subscription, subscriber.subscription_rel"
        " CASCADE",
        "ALTER TABLE log DROP CONSTRAINT poison",
    )
    await faults.execute("ALTER SUBSCRIPTION s QUARANTINE RETRY")
    faults.worker.start()
    await faults.target.wait_for(COUNT, 0)
    counts = await faults.finish()
    assert counts["log"] == 4
