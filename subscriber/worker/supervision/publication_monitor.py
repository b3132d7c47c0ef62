"""PublicationMonitor: notices that tables of subscriptions are not published any more, and remembers it.

**Purpose.** A publisher decodes each change with the publications of its time. A table that is removed from a
publication, or whose publication is dropped, streams no changes, and no message says so. When it is published again, it
lacks the changes in between, and neither server shows it. The monitor stores what publishes each table
(publisher/memberships.py), and compares it with the publisher in each `publication_interval`.

    stored     publisher now               then
    nothing    anything                    stored; a table that is not published is missed since now
    entries    one of them exists          nothing, if it is the table's own, or the table's name has another one
    entries    none, or not for its name   missed since the last look, though a new entry may publish the table now
    missed     published                   still missed, until a position: `subscriber resync` has to repair the table

**Invariants.**

- A table that is missed stays so until it is synchronized again, repaired, or found equal, behind the position at which
  it was seen published. The trigger forget_missed of the catalog forgets it with state init.
- A look that began before a table was synchronized again is not stored.
- Entries of another server are not compared. The system identifier is asked for before a table is missed.

**Failure cases.**

- The publisher does not answer: nothing is stored. The next look notices a table that was published anew meanwhile.
- No launcher runs: the same. `subscriber status` shows a table that is not published at the moment.
- A publication is changed and changed back with the same entries, as ALTER PUBLICATION … SET with other options: no
  entry is new. Row filters and lists of columns are not compared.
"""

from __future__ import annotations

import anyio

from subscriber import telemetry
from subscriber.catalog.store.memberships import (
    MembershipChange,
    TableMembership,
    load_memberships,
    save_memberships,
)
from subscriber.catalog.store.subscriptions import load_subscriptions
from subscriber.connection.connect import open_session
from subscriber.errors import ProtocolError, SubscriberError
from subscriber.formatting import count
from subscriber.lsn import Lsn
from subscriber.publisher.answers import parsing
from subscriber.publisher.connection import Publisher
from subscriber.publisher.memberships import PublishedTables, all_entries, read_published_tables
from subscriber.status.unpublished import names_of, synchronize_remedy
from subscriber.subscription import Subscription
from subscriber.worker.context import LauncherContext

APPLICATION_NAME = "subscriber publications"
CONNECT_TIMEOUT = 10.0  # seconds
TABLES_PER_SECOND = 1000  # the interval grows with the number of tables

_POSITION = """
SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
            ELSE pg_catalog.pg_current_wal_lsn() END
"""


class PublicationMonitor:
    """Looks at the publications of all subscriptions of one target."""

    def __init__(self, context: LauncherContext) -> None:
        self._context = context
        self._seen: dict[int, Lsn] = {}  # the position of the last look, by OID of the subscription
        self._tables = 0

    async def run(self) -> None:
        """Look until canceled. An error is logged, and the look repeated."""
        while True:
            try:
                await self.look()
            except Exception as error:
                if isinstance(error, SubscriberError | OSError):
                    telemetry.log(telemetry.DEBUG, f"could not read the publications of subscriptions: {error}")
                else:
                    telemetry.log_error(error)
            await anyio.sleep(max(self._context.settings.publication_interval, self._tables / TABLES_PER_SECOND))

    async def look(self) -> None:
        """Look at all subscriptions once, concurrently.

        Raises:
            SubscriberError: the target cannot be read.
        """
        async with self._context.catalog.use() as connection:
            subscriptions = await load_subscriptions(connection)
            # Before the publisher is known, no worker has connected to it.
            known = {s.oid: (s, await load_memberships(connection, s.oid)) for s in subscriptions if s.system_id}
        self._seen = {subid: lsn for subid, lsn in self._seen.items() if subid in known}
        self._tables = sum(len(tables) for _, tables in known.values())
        async with anyio.create_task_group() as tasks:
            for subscription, memberships in known.values():
                if memberships:
                    tasks.start_soon(self._look, subscription, memberships)

    async def _look(self, subscription: Subscription, memberships: list[TableMembership]) -> None:
        """Look at one subscription. No error leaves this method."""
        try:
            with anyio.fail_after(CONNECT_TIMEOUT):
                position, published = await self._read(subscription)
                changes = find_changes(memberships, published, subscription.system_id or "")
                if any(change.missed for change in changes) and not await self._is_same_server(subscription):
                    return
            if changes:
                since = self._seen.get(subscription.oid, position)
                async with self._context.catalog.use() as connection:
                    await save_memberships(connection, subscription.oid, changes, since, position)
                self._warn(subscription, memberships, changes, since)
            self._seen[subscription.oid] = position
        except (SubscriberError, OSError, TimeoutError) as error:
            # The apply worker reports that the publisher cannot be reached.
            telemetry.log(telemetry.DEBUG, f"could not read publications: {error}", subscription=subscription.name)
        except Exception as error:
            telemetry.log_error(error)

    async def _read(self, subscription: Subscription) -> tuple[Lsn, PublishedTables]:
        async with await open_session(
            subscription.conninfo,
            application_name=APPLICATION_NAME,
            must_use_password=subscription.must_use_password,
            timeout=CONNECT_TIMEOUT,
        ) as session:
            # The position is read first, so the tables were published at it or later.
            rows = await session.rows(_POSITION)
            with parsing("its position"):
                position = Lsn.parse(rows[0][0] or "")
            return position, await read_published_tables(session, subscription.publications)

    async def _is_same_server(self, subscription: Subscription) -> bool:
        """Return True if the server is the subscription's publisher, and not one that has taken its address."""
        async with await Publisher.connect(
            subscription.conninfo,
            application_name=APPLICATION_NAME,
            client_encoding=self._context.catalog.encoding,
            must_use_password=subscription.must_use_password,
            timeout=CONNECT_TIMEOUT,
        ) as publisher:
            return str((await publisher.identify_system()).systemid) == subscription.system_id

    def _warn(
        self,
        subscription: Subscription,
        memberships: list[TableMembership],
        changes: list[MembershipChange],
        since: Lsn,
    ) -> None:
        missed = {change.relid for change in changes if change.missed}
        tables = [membership for membership in memberships if membership.relid in missed]
        if not tables:
            return
        telemetry.log(
            telemetry.WARNING,
            f'{count(len(tables), "table")} of subscription "{subscription.name}" '
            f"{'was' if len(tables) == 1 else 'were'} removed from its publications",
            detail=f"Changes since {since} may be missing in {names_of([table.name for table in tables])}.",
            hint=synchronize_remedy(subscription, tables),
            event="table.unpublished",
            subscription=subscription.name,
        )


def find_changes(
    memberships: list[TableMembership], published: PublishedTables, system_id: str
) -> list[MembershipChange]:
    """Compare what is stored with the publisher. Returns what is to be stored.

    Args:
        memberships: the tables of a subscription.
        published: the publisher's answer.
        system_id: the publisher's system identifier.

    Raises:
        ProtocolError: a system identifier is malformed.
    """
    if not system_id.isalnum():
        raise ProtocolError("invalid system identifier")
    existing = all_entries(published.tables)
    changes = []
    for table in memberships:
        entries = published.tables.get(table.source, frozenset())
        now = " ".join((system_id, *sorted(entries)))
        known_system, *known = table.stored.split() if table.stored else [""]
        if known_system == system_id:
            missed = bool(known) and (not entries or existing.isdisjoint(known))
        else:
            missed = not entries  # nobody has looked at this server yet
        if now != table.stored:
            changes.append(MembershipChange(table.relid, table.stored, now, bool(entries), missed))
    return changes
