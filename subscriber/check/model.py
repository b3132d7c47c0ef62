"""The data of `subscriber check`: the facts about both servers, and the findings derived from the facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from subscriber.apply.relation_map import ForeignCode
from subscriber.check.recipe import OwnedTable, PublisherRoles, TargetRoles
from subscriber.publisher.sequences import SequenceDefinition
from subscriber.publisher.standby_slots import StandbySlot
from subscriber.remedy import Remedy, command_of, hint_of, json_of
from subscriber.subscription import SequenceMode, TwoPhaseState


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding.

    Attributes:
        level: whether it keeps the subscription from working.
        subject: the server or object: publisher, target, publication p, table s.t.
        message: what is the case.
        remedy: what to do about it. A statement is for the server that the remedy or
            `subject` names. None: nothing has to be done.
        kind: the rule, if the finding is part of the preflight of a move, where it can be waived by its name.
    """

    level: Level
    subject: str
    message: str
    remedy: Remedy | None = None
    kind: str | None = None

    @property
    def fix(self) -> str | None:
        """The remedy as text. None: there is none."""
        return hint_of(self.remedy)

    @property
    def command(self) -> str | None:
        """The exact next command. None: as `fix`, or the remedy is words only."""
        return command_of(self.remedy)

    def as_json(self) -> dict[str, Any]:
        """Return the finding as a JSON value."""
        return {
            "level": self.level,
            "subject": self.subject,
            "message": self.message,
            "fix": self.fix,
            "fix_command": self.command,
            "fix_remedy": json_of(self.remedy),
            "kind": self.kind,
        }


@dataclass(frozen=True, slots=True)
class PublisherFacts:
    version: int  # server_version_num
    version_text: str
    wal_level: str
    slots: int
    max_slots: int
    senders: int
    max_senders: int
    role: str
    may_replicate: bool  # superuser or REPLICATION
    encoding: str
    in_recovery: bool
    max_prepared: int  # max_prepared_transactions
    effective_wal_level: str | None = None  # since 19, which raises it when the first logical slot is created

    @property
    def can_decode(self) -> bool:
        """Return True if a logical slot can be created and read."""
        return self.wal_level == "logical" or (self.effective_wal_level is not None and self.wal_level == "replica")


@dataclass(frozen=True, slots=True)
class PublicationFacts:
    name: str
    exists: bool
    all_tables: bool = False
    inserts: bool = True
    updates: bool = True
    deletes: bool = True
    truncates: bool = True
    others: tuple[str, ...] = ()  # of a publication that does not exist: all publications of the publisher


@dataclass(frozen=True, slots=True)
class SlotFacts:
    """The slot of an existing subscription."""

    name: str
    exists: bool
    plugin: str | None = None
    is_lost: bool = False
    in_this_database: bool = True
    retained_bytes: int | None = None
    two_phase: bool = False


@dataclass(frozen=True, slots=True)
class ColumnFacts:
    name: str
    type: str  # as format_type() formats it
    is_generated: bool = False
    is_required: bool = False  # NOT NULL without default; only read on the target


@dataclass(frozen=True, slots=True)
class CheckedSourceTable:
    schema: str
    name: str
    replica_identity: str  # pg_class.relreplident
    partitioned: bool
    columns: tuple[ColumnFacts, ...]  # the published ones
    key: tuple[str, ...]  # columns of the replica identity's index; empty if there is none
    readable: bool  # SELECT for the initial copy
    row_security: bool = False  # policies decide which rows the role sees
    closed_partitions: tuple[tuple[str, str], ...] = ()  # leaves that the role may not read


@dataclass(frozen=True, slots=True)
class CheckedTargetTable:
    relkind: str
    columns: tuple[ColumnFacts, ...]
    key: tuple[str, ...]  # of the index named by REPLICA IDENTITY, else of the primary key; empty if there is none
    owner: str
    may_act_as_owner: bool
    row_security: bool  # and the owner is not exempt
    has_rows: bool | None  # None: not checked
    uses_schema: bool = True  # the role of --target may use its schema
    deferrable: bool = False  # its primary key is deferrable, and therefore cannot serve as key here
    writers: tuple[str, ...] = ()  # other subscriptions that may own rows of the same rule of ownership


@dataclass(frozen=True, slots=True)
class TargetFacts:
    version: int
    version_text: str
    role: str
    is_superuser: bool
    encoding: str
    in_recovery: bool
    has_schema: bool  # schema "subscriber"
    may_create_subscription: bool  # pg_create_subscription, and CREATE on the database
    may_set_replication_role: bool
    origins: int
    max_origins: int
    origins_setting: str  # the setting's name: max_active_replication_origins since 18
    database: str
    max_prepared: int  # max_prepared_transactions
    may_create_schema: bool = True
    has_foreign_schema: bool = False  # a schema "subscriber" that belongs to an application
    is_unserved: bool = False  # no launcher runs, and the role may not run one
    origins_by_superuser: bool = True  # schema "subscriber" belongs to a superuser, or will, and so has origins


@dataclass(frozen=True, slots=True)
class AppliedTable:
    """A table of the target, as seen by the session that applies changes."""

    schema: str
    name: str
    owner: str
    acting: str  # the role that its changes are applied as: its owner, or with run_as_owner the subscription's
    may_act: bool  # the session may act as that role
    code: tuple[ForeignCode, ...]  # of roles that the session must not trust
    owner_may_act: bool = True  # the owner of the subscription may act as the table's
    lacks: tuple[str, ...] = ()  # privileges on the table that the acting role lacks
    uses_schema: bool = True  # the acting role, or that of the session, may use the table's schema


@dataclass(frozen=True, slots=True)
class SubscriptionOwner:
    """The owner of an existing subscription."""

    name: str
    is_superuser: bool
    inherited: bool  # the role of --target has the owner's privileges


@dataclass(frozen=True, slots=True)
class ApplyFacts:
    """The session that applies changes."""

    role: str
    is_superuser: bool
    is_admitted: bool  # it may call the functions of schema "subscriber"
    tables: tuple[AppliedTable, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceAccess:
    """A sequence of the target that the subscription may not set."""

    owned: OwnedTable  # the sequence, or the table that owns it
    acting: str  # the role that sets it, or the subscription's owner if that may not act as the sequence's
    may_act: bool  # the role of the subscription may act as the sequence's owner. It lacks UPDATE otherwise.


@dataclass(frozen=True, slots=True)
class CheckedSequence:
    """A sequence of the publisher, and the target's one of the same name."""

    name: tuple[str, str]  # schema, name
    readable: bool  # by the role that connects
    definition: SequenceDefinition
    owner: str | None  # schema.table.column that owns it
    on_target: SequenceDefinition | None  # None: the target has none
    denied: SequenceAccess | None = None  # None: the subscription may set the target's one


@dataclass(frozen=True, slots=True)
class SequenceFacts:
    """The sequences of both servers, and those that a subscription synchronizes."""

    version: int  # server_version_num of the publisher
    role: str  # that connects to the publisher
    sequences: tuple[CheckedSequence, ...]
    published: frozenset[tuple[str, str]]  # contained in the publications; before 19 owned by published columns
    named: frozenset[tuple[str, str]]  # by the option sequence_names
    mode: SequenceMode
    all_tables: str | None  # a publication FOR ALL TABLES


@dataclass(frozen=True, slots=True)
class StandbyFacts:
    """A standby of the publisher that the connection string names. If it was not queried, it has only `error`."""

    host: str
    error: str | None = None
    sync_replication_slots: bool = False
    hot_standby_feedback: bool = False
    primary_slot: bool = False  # primary_slot_name is set
    slot_is_synced: bool = False  # there is a permanent, valid copy of the subscription's slot
    reason: str | None = None  # why the slot is invalid, or was not synchronized the last time (since 19)


@dataclass(frozen=True, slots=True)
class FailoverFacts:
    """The facts that decide whether a subscription with failover = true survives a failover of the publisher."""

    slot: str
    subscription: str
    is_failover_slot: bool
    standby_slots: tuple[StandbySlot, ...]  # of synchronized_standby_slots
    physical_slots: tuple[str, ...]
    standbys: tuple[StandbyFacts, ...]


@dataclass(slots=True)
class Facts:
    """All facts that are known. A field is None or empty if the server could not be queried."""

    publisher: PublisherFacts | None = None
    target: TargetFacts | None = None
    publications: Sequence[PublicationFacts] = ()
    subscription: str | None = None  # its name; None: it does not exist yet
    slot: SlotFacts | None = None  # of the existing subscription; None: it has none
    two_phase: TwoPhaseState = TwoPhaseState.DISABLED  # PENDING also for a new subscription that wants it
    tables: Sequence[tuple[CheckedSourceTable, CheckedTargetTable | None]] = ()
    failures: list[Finding] = field(default_factory=list)  # failed queries, with the reason
    subscription_owner: SubscriptionOwner | None = None  # None: the subscription does not exist yet
    apply: ApplyFacts | None = None  # also None without schema "subscriber"
    target_roles: TargetRoles | None = None  # for the recipe of least privilege
    publisher_roles: PublisherRoles | None = None
    sequences: SequenceFacts | None = None
    encoding: str | None = None  # of the target's database, in which rows are sent
    unpublished: Sequence[tuple[str, Remedy]] = ()  # messages about tables that are not published
    failover: FailoverFacts | None = None  # None: the subscription has no failover slot

    @property
    def is_new(self) -> bool:
        """Return True if the subscription does not exist yet."""
        return self.subscription is None
