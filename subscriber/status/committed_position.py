"""The position behind all transactions that a publisher has committed, for a wait until they are applied.

A walsender sends WAL that is on the publisher's disk. Three facts decide which position it reaches:

- A transaction with synchronous_commit = off is committed before it is on the disk. The server writes it there within
  three times `wal_writer_delay`.
- A transaction that has not ended may have records in memory only, for much longer. Nobody waits for them.
- Behind the last record of a page, the server reports a position behind the header of the next page. Nothing is there
  yet, and a walsender reports the start of the page.

So the position of the last record is the end only if the disk reaches it in time. Otherwise it is that of the disk.
"""

from __future__ import annotations

from subscriber.connection.connect import open_session
from subscriber.limited_wait import LimitedWait
from subscriber.lsn import Lsn
from subscriber.publisher.answers import count, parsing
from subscriber.subscription import Subscription

CONNECT_TIMEOUT = 10.0  # seconds
HEADER = 24  # bytes of the header of a page of WAL
FIRST_HEADER = 40  # bytes of the header of the first page of a segment

_END = """
SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
            ELSE pg_catalog.pg_current_wal_insert_lsn() END, pg_catalog.current_setting('wal_block_size'),
       (SELECT s.setting FROM pg_catalog.pg_settings s WHERE s.name = 'wal_segment_size'),
       (SELECT s.setting FROM pg_catalog.pg_settings s WHERE s.name = 'wal_writer_delay')
"""
_ON_DISK = """
SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
            ELSE pg_catalog.pg_current_wal_flush_lsn() END
"""


async def committed_position(subscription: Subscription) -> Lsn:
    """Return a position of a subscription's publisher behind all transactions that it has committed.

    Raises:
        ConnectionLost: the publisher cannot be reached.
        ServerError: the publisher refuses the connection or the query.
        ProtocolError: its answer is malformed.
    """
    async with await open_session(
        subscription.conninfo,
        application_name=f"{subscription.name} wait",
        must_use_password=subscription.must_use_password,
        timeout=CONNECT_TIMEOUT,
    ) as session:
        rows = await session.rows(_END)
        with parsing("its position"):
            ((text, page, segment, delay),) = rows
            end = end_of_record(Lsn.parse(text or ""), count(page), count(segment))
            limit = 3 * min(10_000, count(delay)) / 1000  # the server's limit of the delay is 10 s
        wait = LimitedWait("the publisher's WAL writer", limit)
        while True:
            rows = await session.rows(_ON_DISK)
            with parsing("its position"):
                on_disk = Lsn.parse(rows[0][0] or "")
            if on_disk >= end:
                return end
            if wait.is_over:
                return on_disk
            await wait.pause()


def end_of_record(position: Lsn, page: int, segment: int) -> Lsn:
    """Return the start of a page if `position` is just behind its header, else `position`.

    A record that continues on a page ends behind its header, so it is not at that position.
    """
    if position % segment == FIRST_HEADER:
        return Lsn(position - FIRST_HEADER)
    return Lsn(position - HEADER) if position % page == HEADER else position
