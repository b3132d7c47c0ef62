"""The database that `subscriber demo --migrate` moves: a shop, and applications that write to it.

An application knows each order that a server has acknowledged. If a server refuses it or ends its session, it connects
to the other one, as clients do whose address changes. So the times of the acknowledgements show the pause of a move.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

import anyio
import asyncpg

from subscriber.connection.connect import connect
from subscriber.errors import SubscriberError

ROLE = "shop_application"
MOVE = "move"  # the subscription, and the publication that `migrate start` creates
CUSTOMERS = 1000
APPLICATIONS = 4
THINK = 0.01  # seconds between two orders of an application
ELSEWHERE = 0.01  # seconds before a refused application connects again
ATTEMPT = 10.0  # seconds for one order

SCHEMA = f"""
CREATE SCHEMA shop;
CREATE TYPE shop.state AS ENUM ('new', 'paid', 'sent');
CREATE TABLE shop.customer (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    mail text NOT NULL UNIQUE,
    orders integer NOT NULL DEFAULT 0
);
CREATE TABLE shop.purchase (
    id bigint GENERATED ALWAYS AS IDENTITY,
    customer bigint NOT NULL REFERENCES shop.customer,
    state shop.state NOT NULL DEFAULT 'new',
    day date NOT NULL DEFAULT CURRENT_DATE,
    total numeric(12, 2) NOT NULL,
    token text NOT NULL,
    PRIMARY KEY (id, day)
) PARTITION BY RANGE (day);
CREATE TABLE shop.purchase_old PARTITION OF shop.purchase FOR VALUES FROM (MINVALUE) TO ('2026-01-01');
CREATE TABLE shop.purchase_new PARTITION OF shop.purchase FOR VALUES FROM ('2026-01-01') TO (MAXVALUE);
CREATE INDEX purchase_customer ON shop.purchase (customer, day);
CREATE SEQUENCE shop.invoice START 1000;
CREATE MATERIALIZED VIEW shop.turnover AS SELECT day, sum(total) AS total FROM shop.purchase GROUP BY day;
INSERT INTO shop.customer (mail) SELECT 'customer' || i || '@example.com' FROM generate_series(1, {CUSTOMERS}) i;
INSERT INTO shop.purchase (customer, day, total, token)
    SELECT 1 + i % {CUSTOMERS}, date '2025-06-01' + i % 365, i % 100, 'old ' || i FROM generate_series(1, 50000) i;
REFRESH MATERIALIZED VIEW shop.turnover;
ALTER TABLE public.pgbench_history REPLICA IDENTITY FULL;
GRANT USAGE ON SCHEMA shop TO {ROLE};
GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA shop TO {ROLE};
GRANT USAGE ON ALL SEQUENCES IN SCHEMA shop TO {ROLE};
"""
_ORDER = """
WITH known AS (UPDATE shop.customer SET orders = orders + 1 WHERE id = $2 RETURNING id)
INSERT INTO shop.purchase (customer, total, token) SELECT id, nextval('shop.invoice') % 100, $1 FROM known RETURNING id
"""
_TOKENS = "SELECT id, token FROM shop.purchase WHERE token LIKE 'new %'"


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """An order that a server has committed."""

    at: float  # monotonic()
    server: int  # index of the server
    id: int
    token: str


@dataclass
class Shop:
    """The applications of a shop.

    Attributes:
        dsns: connection strings of the servers, for the role of the applications.
        acknowledged: orders that a server has committed, in the order of their acknowledgement.
        refused: the number of orders that a server has refused, or whose session it has ended.
    """

    dsns: Sequence[str]
    acknowledged: list[Acknowledgement] = field(default_factory=list)
    refused: int = 0
    stopped: bool = False

    async def run(self) -> None:
        """Write until `stopped` is true."""
        async with anyio.create_task_group() as tasks:
            for number in range(APPLICATIONS):
                tasks.start_soon(self._run_application, number)

    async def _run_application(self, number: int) -> None:
        server, order = 0, 0
        connection: asyncpg.Connection[asyncpg.Record] | None = None
        try:
            while not self.stopped:
                order += 1
                token = f"new {number}-{order}"
                try:
                    with anyio.fail_after(ATTEMPT):
                        connection = connection or await connect(self.dsns[server], application_name="shop")
                        identity = await connection.fetchval(
                            _ORDER, token, 1 + (order * APPLICATIONS + number) % CUSTOMERS
                        )
                except (asyncpg.PostgresError, asyncpg.InterfaceError, SubscriberError, OSError):
                    self.refused += 1
                    if connection is not None:
                        connection.terminate()
                    connection, server = None, (server + 1) % len(self.dsns)
                    await anyio.sleep(ELSEWHERE)
                    continue
                self.acknowledged.append(Acknowledgement(monotonic(), server, identity, token))
                await anyio.sleep(THINK)
        finally:
            if connection is not None:
                connection.terminate()

    async def wait_for_writes(self, server: int) -> None:
        """Wait until an order was acknowledged by that server, after all that are known now."""
        known = len(self.acknowledged)
        with anyio.fail_after(60):
            while not any(order.server == server for order in self.acknowledged[known:]):
                await anyio.sleep(THINK)

    def pause(self) -> tuple[float, float]:
        """Return the times of the last order on the former server, and of the first on the present one."""
        present = self.acknowledged[-1].server
        last = max(order.at for order in self.acknowledged if order.server != present)
        first = min(order.at for order in self.acknowledged if order.server == present and order.at > last)
        return last, first


@dataclass(frozen=True, slots=True)
class Proof:
    """The acknowledged orders beside the rows of the server that has the database."""

    acknowledged: int
    lost: int  # acknowledged, and not there
    twice: int  # applied more than once
    repeated: int  # values of the identity column that were given twice

    @property
    def is_whole(self) -> bool:
        return not (self.lost or self.twice or self.repeated)


async def prove(shop: Shop, dsn: str) -> Proof:
    """Compare the acknowledged orders with the rows of a server."""
    connection = await connect(dsn, application_name="subscriber demo")
    try:
        rows = await connection.fetch(_TOKENS)
    finally:
        connection.terminate()
    there = {token: identity for identity, token in rows}
    return Proof(
        acknowledged=len(shop.acknowledged),
        lost=sum(there.get(order.token) != order.id for order in shop.acknowledged),
        twice=len(rows) - len(there),
        repeated=len(rows) - len({identity for identity, _ in rows}),
    )


def timeline(shop: Shop, names: Sequence[str], *, around: float, width: float = 0.05, columns: int = 60) -> list[str]:
    """Return a line for each server: how many orders it has acknowledged in each interval.

    Args:
        shop: its applications.
        names: of the servers.
        around: monotonic() of the middle.
        width: seconds of an interval.
        columns: number of intervals.
    """
    start = around - width * columns / 2
    counts = [[0] * columns for _ in names]
    for order in shop.acknowledged:
        with contextlib.suppress(IndexError):
            if order.at >= start:
                counts[order.server][int((order.at - start) / width)] += 1
    most = max(1, *(max(count) for count in counts))
    bars = " ▁▂▃▄▅▆▇█"
    return [
        f"{name:>6} {''.join(bars[-(-count * (len(bars) - 1) // most)] for count in line)}"
        for name, line in zip(names, counts, strict=True)
    ]
