"""What `subscriber status` reads: the catalog rows of one snapshot, and the publisher's answer. No I/O here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from subscriber.catalog.store.audit import ComparedTables
from subscriber.catalog.store.memberships import DifferentTable, TableMembership
from subscriber.catalog.store.quarantine import QuarantineSummary
from subscriber.catalog.store.subscription_rel import SubscriptionRel
from subscriber.catalog.store.subscription_sequence import SubscriptionSequence
from subscriber.catalog.store.workers import WorkerStatus
from subscriber.catalog.table_names import LostTable
from subscriber.lsn import Lsn
from subscriber.publisher.memberships import PublishedTables
from subscriber.publisher.standby_slots import StandbySlot
from subscriber.publisher.wal_holders import WalHolders
from subscriber.remedy import Remedy
from subscriber.status.slot_statistics import SlotStatistics
from subscriber.status.slot_wal import SlotLimits
from subscriber.status.stages import WalsenderPositions
from subscriber.status.transactions import Prepared
from subscriber.subscription import Subscription


@dataclass(frozen=True, slots=True)
class PublisherAnswer:
    """The publisher's answer about a subscription's slot.

    If it could not be queried, all fields but `error` are None or empty.
    """

    position: Lsn | None = None  # end of its WAL; on a standby the replay position
    confirmed: Lsn | None = None  # the slot's confirmed_flush_lsn; None without the slot
    slot_exists: bool | None = None
    slot_active: bool | None = None
    wal_status: str | None = None  # reserved, extended, unreserved, lost
    retained_bytes: int | None = None  # bytes of WAL retained because of the slot
    replay_lag: float | None = None  # seconds, as the publisher measures it; None if nothing is unconfirmed
    now: datetime | None = None  # its clock
    published: PublishedTables | None = None  # None: it was not queried about its publications
    statistics: SlotStatistics = field(default_factory=SlotStatistics)
    standby_slots: tuple[StandbySlot, ...] = ()  # of standbys that its walsender waits for
    limits: SlotLimits = field(default_factory=SlotLimits)
    wal_holders: WalHolders = field(default_factory=WalHolders)
    walsender: WalsenderPositions = field(default_factory=WalsenderPositions)
    error: str | None = None
    error_remedy: Remedy | None = None

    @property
    def held_bytes(self) -> int | None:
        """The WAL before the slot's confirmed position that the slot keeps. None: not known."""
        if self.position is None or self.confirmed is None or self.retained_bytes is None:
            return None
        return max(0, self.retained_bytes - (self.position - self.confirmed))


@dataclass(frozen=True, slots=True)
class LockWait:
    """A session of a subscription that is blocked by a lock on the target."""

    pid: int
    seconds: float
    holders: tuple[str, ...]  # `process 9 ("psql")`, or the name of a prepared transaction


@dataclass(frozen=True, slots=True)
class StatusSnapshot:
    """The catalog rows of one snapshot."""

    at: datetime  # the target's clock
    launcher_pid: int | None  # process id of its backend on the target; None: no launcher runs
    subscriptions: Sequence[Subscription]
    workers: Sequence[WorkerStatus]
    relations: Mapping[int, Sequence[SubscriptionRel]]  # by subid
    progress: Mapping[int, Lsn] = field(default_factory=dict)  # by subid
    errors: Mapping[int, tuple[int, int, int]] = field(default_factory=dict)  # by subid: apply, tables, sequences
    prepared: Mapping[int, Sequence[Prepared]] = field(default_factory=dict)  # by subid
    conflicts: Mapping[int, Mapping[str, int]] = field(default_factory=dict)  # by subid: number of conflicts by type
    launcher_age: float | None = None  # seconds since the launcher renewed its lease; None: not known
    lock_waits: Mapping[int, Sequence[LockWait]] = field(default_factory=dict)  # by subid: the long waits
    lost: Mapping[int, Sequence[LostTable]] = field(default_factory=dict)  # by subid
    memberships: Mapping[int, Sequence[TableMembership]] = field(default_factory=dict)  # by subid
    sequences: Mapping[int, Sequence[SubscriptionSequence]] = field(default_factory=dict)  # by subid
    quarantine: Mapping[int, QuarantineSummary] = field(default_factory=dict)  # by subid; none for an empty one
    different: Mapping[int, Sequence[DifferentTable]] = field(default_factory=dict)  # by subid: tables that differ
    comparisons: Mapping[int, ComparedTables] = field(default_factory=dict)  # by subid: the last one that has ended
    handed_back: Collection[str] = ()  # names of subscriptions that `subscriber hand-back` has disabled
    adopted_in_part: Collection[str] = ()  # names that `subscriber adopt` has not finished to take from pglogical
