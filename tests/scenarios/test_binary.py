"""binary = true: values are sent in their types' binary format, and mismatched types are reported."""

from __future__ import annotations

from tests.code_type import CODE
from tests.scenarios.conftest import Pair

MISMATCH = "ERROR:  (incorrect binary data format|insufficient data left in message)"


async def test_binary_values_need_the_same_types(pair: Pair) -> None:
    await pair.source.needs(16, "tables are copied in binary")
    await pair.source.execute("CREATE TABLE t (id int PRIMARY KEY, n int)")
    await pair.target.execute("CREATE TABLE t (id int PRIMARY KEY, n bigint)")
    await pair.source.execute("CREATE PUBLICATION p FOR TABLE t", "INSERT INTO t VALUES (1, 1)")
    await pair.subscriber.create(pair.source, "p", binary=True)
    await pair.fails(MISMATCH)
    await pair.subscriber.execute("ALTER SUBSCRIPTION s SET (binary = false)")
    await pair.caught_up()
    await pair.change("INSERT INTO t VALUES (2, 2)")
    pair.subscriber.log.clear()
    await pair.subscriber.execute("ALTER SUBSCRIPTION s SET (binary = true)")
    await pair.subscriber.log.wait_for("apply worker .* has started")  # or the one before it takes the row as text
    await pair.source.execute("INSERT INTO t VALUES (3, 3)")
    await pair.fails(MISMATCH)
    await pair.subscriber.execute("ALTER SUBSCRIPTION s SET (binary = false)")
    await pair.caught_up()
    await pair.assert_same("SELECT id, n FROM t ORDER BY id")


async def test_text_and_binary_values_in_one_row(pair: Pair) -> None:
    """Type aclitem has no binary form: the publisher sends it as text, COPY is refused, the stream is not."""
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, a aclitem, n numeric)")
    await pair.subscribe("FOR TABLE t", binary=True, copy_data=False)
    await pair.change("INSERT INTO t VALUES (1, '=r/postgres', 1.5), (2, NULL, 2.5)", "UPDATE t SET n = 3 WHERE id = 1")
    await pair.assert_same("SELECT id, a::text, n FROM t ORDER BY id")


async def test_a_value_that_the_publisher_cannot_send(pair: Pair) -> None:
    """As in PostgreSQL, the subscription stops; the error has the statement with which it continues."""
    await pair.both(CODE, "CREATE TABLE t (codes code[])")
    await pair.subscribe("FOR TABLE t", binary=True, copy_data=False)
    await pair.source.execute("INSERT INTO t VALUES ('{7}')")
    command = 'ALTER SUBSCRIPTION "s" SET (binary = false);'
    await pair.target.wait_for("SELECT error_remedy ->> 'command' FROM subscriber.worker WHERE relid = 0", command)
    await pair.subscriber.execute(command)
    await pair.target.wait_for("SELECT codes::text FROM t", "{7}")
