"""The physical slots that logical walsenders of failover slots wait for: synchronized_standby_slots, since 17.

A walsender sends a change of a failover slot only after these standbys have flushed it. So a standby that is promoted
has every change that a subscriber has. A standby that is down, or a slot that is missing, stops such a walsender.

Source: src/backend/replication/slot.c, StandbySlotsHaveCaughtup()
"""

from __future__ import annotations

from dataclasses import dataclass

from subscriber import server_features as features
from subscriber.connection.session import Session
from subscriber.publisher.answers import parsing
from subscriber.quoting import literal

_LISTED = """
SELECT n.name, s.active
  FROM pg_catalog.regexp_split_to_table(
         pg_catalog.replace(pg_catalog.current_setting('synchronized_standby_slots'), '"', ''), ',') WITH ORDINALITY
         l (item, number)
  CROSS JOIN LATERAL (SELECT pg_catalog.lower(pg_catalog.btrim(l.item)) AS name) n
  LEFT JOIN pg_catalog.pg_replication_slots s ON s.slot_name = n.name AND s.slot_type = 'physical'
 WHERE n.name <> ''
 ORDER BY l.number
"""
# Roles without pg_read_all_stats see the wait events of their own sessions only.
_WAITS = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_replication_slots s
                 JOIN pg_catalog.pg_stat_activity a ON a.pid = s.active_pid
                WHERE s.slot_name = {slot} AND a.wait_event = 'WaitForStandbyConfirmation')
"""


@dataclass(frozen=True, slots=True)
class StandbySlot:
    """A slot of synchronized_standby_slots."""

    name: str
    exists: bool
    active: bool = False  # a standby is connected

    @property
    def condition(self) -> str:
        """The slot and its condition, such as `"a", which is inactive`."""
        state = "which does not exist" if not self.exists else "which is inactive" if not self.active else ""
        return f'"{self.name}"' + (f", {state}" if state else "")


async def read_standby_slots(session: Session) -> tuple[StandbySlot, ...]:
    """Return the slots that synchronized_standby_slots lists, in its order; none before PostgreSQL 17.

    Raises:
        SubscriberError: the query failed, or the answer is malformed.
    """
    if not features.FAILOVER_SLOTS.is_in(session.server_version):
        return ()
    rows = await session.rows(_LISTED)
    with parsing("its setting synchronized_standby_slots"):
        return tuple(StandbySlot(name or "", active is not None, active == "t") for name, active in rows)


async def read_slots_waited_for(session: Session, slot: str) -> tuple[StandbySlot, ...]:
    """Return the standbys' slots that the walsender of `slot` waits for; none if it does not wait.

    These are the missing and inactive ones. If there are none, they are all that are listed.

    Raises:
        SubscriberError: a query failed, or an answer is malformed.
    """
    if not features.FAILOVER_SLOTS.is_in(session.server_version):
        return ()
    if await session.rows(_WAITS.format(slot=literal(slot))) != [("t",)]:
        return ()
    listed = await read_standby_slots(session)
    return tuple(standby for standby in listed if not standby.active) or listed
