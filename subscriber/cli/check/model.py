"""What `subscriber check` knows: the servers' answers, and the findings that become of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from subscriber.apply.relation_map import ForeignCode
from subscriber.cli.check.recipe import PublisherRoles, TargetRoles
from subscriber.subscription import TwoPhaseState


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """`fix` is SQL for the server that `subject` names, or words; None where nothing is to do."""

    level: Level
    subject: str  # publisher, target, publication p, table s.t
    message: str
    fix: str | None = None


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


@dataclass(frozen=True, slots=True)
class PublicationFacts:
    name: str
    exists: bool
    all_tables: bool = False
    inserts: bool = True
    updates: bool = True
    deletes: bool = True
    truncates: bool = True
    own_tables: tuple[str, ...] = ()  # of schema "subscriber"


@dataclass(frozen=True, slots=True)
class SlotFacts:
    """The slot of a subscription that exists already."""

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
    type: str  # as format_type() prints it
    is_generated: bool = False
    is_required: bool = False  # NOT NULL without default: only looked at on the target


@dataclass(frozen=True, slots=True)
class CheckedSourceTable:
    schema: str
    name: str
    replica_identity: str  # pg_class.relreplident
    partitioned: bool
    columns: tuple[ColumnFacts, ...]  # the published ones
    key: tuple[str, ...]  # columns of the replica identity's index; empty: there is none
    readable: bool  # SELECT for the initial copy


@dataclass(frozen=True, slots=True)
class CheckedTargetTable:
    relkind: str
    columns: tuple[ColumnFacts, ...]
    key: tuple[str, ...]  # of the index named by REPLICA IDENTITY, else of the primary key; empty: none
    owner: str
    may_act_as_owner: bool
    row_security: bool  # and the owner is not exempt
    has_rows: bool | None  # None: not looked at
    deferrable: bool = False  # its primary key is, and so is no key here


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
    origins_setting: str  # its name: max_active_replication_origins since 18
    database: str
    max_prepared: int  # max_prepared_transactions
    may_create_schema: bool = True
    origins_by_superuser: bool = True  # schema "subscriber" is a superuser's, or will be, and so has origins


@dataclass(frozen=True, slots=True)
class AppliedTable:
    """A table of the target, for the session that applies changes."""

    schema: str
    name: str
    owner: str
    may_act_as_owner: bool
    code: tuple[ForeignCode, ...]  # of roles that the session must not trust


@dataclass(frozen=True, slots=True)
class ApplyFacts:
    """The session that applies changes."""

    role: str
    is_superuser: bool
    is_admitted: bool  # it may use the functions of schema "subscriber"
    tables: tuple[AppliedTable, ...] = ()


@dataclass(slots=True)
class Facts:
    """Everything that is known; None or empty where a server could not be asked."""

    publisher: PublisherFacts | None = None
    target: TargetFacts | None = None
    publications: Sequence[PublicationFacts] = ()
    is_new: bool = True  # the subscription does not exist yet
    slot: SlotFacts | None = None  # of the subscription that exists; None: it has none
    two_phase: TwoPhaseState = TwoPhaseState.DISABLED  # pending: wanted, of one that does not exist yet too
    tables: Sequence[tuple[CheckedSourceTable, CheckedTargetTable | None]] = ()
    failures: list[Finding] = field(default_factory=list)  # what could not be asked, and why
    apply: ApplyFacts | None = None  # None also without schema "subscriber"
    target_roles: TargetRoles | None = None  # for the recipe of least privilege
    publisher_roles: PublisherRoles | None = None
    encoding: str | None = None  # of the target's database, in which rows are sent
