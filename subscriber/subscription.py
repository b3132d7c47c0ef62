"""A subscription as the catalog stores it, and the table of options of the statements that create and change it.

An option is one field, made by `_option()`. Options that the catalog stores are fields of SubscriptionOptions; options
that only a statement has are fields of StatementOptions. OPTIONS has a row for each option, by name. These parts of the
program read the table, and need no change for a new option that has a known kind of value:

- catalog/grammar/options.py: the options that each statement takes, and their parsers
- catalog/store/subscriptions.py, catalog/commands/: the statements that read and write the columns
- worker/supervision/supervisor.py: the options whose change restarts the apply worker
- publisher/commands.py, `subscriber check`: the first version of a publisher that has the option
- tools/docs: docs/reference/statements.md and python.md

A new option that is stored also needs its column in migrations/schema.sql. If a change of the option restarts the
worker, the trigger next_generation also has the column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from enum import Enum, StrEnum, auto
from math import inf
from types import MappingProxyType
from typing import Any, Literal

from subscriber.display import sql_identifier
from subscriber.durations import parse_milliseconds
from subscriber.errors import PublisherError
from subscriber.lsn import Lsn
from subscriber.names import apply_origin
from subscriber.ownership import OwnershipRules, parse_ownership
from subscriber.sizes import parse_size
from subscriber.sqlstate import UNDEFINED_OBJECT


class Streaming(StrEnum):
    """`pg_subscription.substream`; the values are the catalog's letters."""

    OFF = "f"
    ON = "t"
    PARALLEL = "p"

    @property
    def option(self) -> Literal["off", "on", "parallel"]:
        """The spelling in CREATE SUBSCRIPTION and START_REPLICATION."""
        return _SPELT[self]


_SPELT: dict[Streaming, Literal["off", "on", "parallel"]] = {
    Streaming.OFF: "off",
    Streaming.ON: "on",
    Streaming.PARALLEL: "parallel",
}


class TwoPhaseState(StrEnum):
    """`pg_subscription.subtwophasestate`; the values are the catalog's letters."""

    DISABLED = "d"
    PENDING = "p"
    ENABLED = "e"


class ConflictHistory(StrEnum):
    """The conflicts that are recorded in `subscriber.conflict_history`."""

    NONE = "none"
    DECIDED = "decided"  # conflicts that a policy decides, and those that stop the stream
    ALL = "all"  # also missing rows and rows of other writers; applying then waits for the target's answers


class SequenceMode(StrEnum):
    """The time at which sequences of the target are set to the publisher's values."""

    NONE = "none"
    COPY = "copy"  # once, when they become part of the subscription, and with REFRESH SEQUENCES
    FOLLOW = "follow"  # also moved ahead of the publisher's while the subscription runs


class CopyEngine(StrEnum):
    """The way in which the launcher makes the initial copy of tables."""

    SNAPSHOT = "snapshot"  # each table in one snapshot, as in PostgreSQL
    RANGES = "ranges"  # each range of a table in a snapshot of its own


class CopyIndexes(StrEnum):
    """The indexes and constraints of the publisher that are built when the rows of a table are copied."""

    NONE = "none"
    AFTER = "after"  # those that the table of the target lacks, before it catches up


class TableCopy(StrEnum):
    """The way in which the rows of a table are synchronized before its changes are applied."""

    COPY = "copy"  # the table is copied
    COMPARE = "compare"  # the rows that differ from the publisher's are repaired
    DELETE_EXTRA = "delete_extra"  # the same, and rows that the publisher does not have are deleted
    TRUNCATE = "truncate"  # the table is emptied and copied


class OnError(StrEnum):
    """The reaction to a transaction that cannot be applied."""

    RETRY = "retry"  # it stops the stream and is retried, as in PostgreSQL
    QUARANTINE = "quarantine"  # it waits in `subscriber.quarantine`, and so do transactions that depend on it


MAX_APPLY_SESSIONS = 64


class OptionStatement(StrEnum):
    """The statements that have options. The values are the words before the options."""

    CREATE = "CREATE"
    SET = "SET"
    PUBLICATION = "SET, ADD, DROP PUBLICATION"
    REFRESH = "REFRESH PUBLICATION"
    REFRESH_TABLE = "REFRESH TABLE"
    SKIP = "SKIP"


class ValueSyntax(Enum):
    """The syntax of an option's value. Each member has a parser in catalog/grammar/options.py."""

    BOOLEAN = auto()
    CHOICE = auto()  # a member of an enum
    NUMBER = auto()  # an integer between two limits
    MILLISECONDS = auto()  # an integer without a unit
    SLOT_NAME = auto()
    SYNCHRONOUS_COMMIT = auto()
    STREAMING = auto()
    ORIGIN = auto()
    LSN = auto()
    CONFLICT_POLICY = auto()
    OWNERSHIP = auto()
    ROLES = auto()
    DURATION = auto()  # a number of milliseconds, or a text with a unit; -1: the setting's value
    SIZE = auto()  # a text with a unit of bytes; 0: no limit
    SEQUENCES = auto()
    COPY_DATA = auto()


@dataclass(frozen=True, slots=True)
class OptionValue:
    """The values that an option may have."""

    syntax: ValueSyntax
    description: str  # for the documentation, in Markdown
    choices: type[StrEnum] | None = None  # of CHOICE
    limits: tuple[int, int] = (0, 0)  # of NUMBER: minimum and maximum


BOOLEAN = OptionValue(ValueSyntax.BOOLEAN, "boolean")


def _choice(choices: type[StrEnum]) -> OptionValue:
    return OptionValue(ValueSyntax.CHOICE, ", ".join(f"`{choice}`" for choice in choices), choices=choices)


def _number(least: int, greatest: int) -> OptionValue:
    return OptionValue(ValueSyntax.NUMBER, f"{least} to {greatest}", limits=(least, greatest))


@dataclass(frozen=True, slots=True)
class OptionColumn:
    """The column of `subscriber.subscription` that stores an option."""

    name: str
    type: str = "boolean"  # in SQL, one of COLUMN_TYPES
    has_states: bool = False  # ALTER SUBSCRIPTION … SET has special statements, which change one state to another
    read: Callable[[Any], Any] | None = None  # converts the column's value to the field's; None: they are the same
    write: Callable[[Any], Any] | None = None  # converts the parsed value to the column's; None: they are the same

    @property
    def parameter(self) -> str:
        """The type of a query parameter with the column's value, for which asyncpg needs no additional codec."""
        return COLUMN_TYPES[self.type][0]

    @property
    def selected(self) -> str:
        """The column in the SELECT list of a query that has the table as `s`."""
        return COLUMN_TYPES[self.type][1].format(f"s.{self.name}") + f" AS {self.name}"

    def write_value(self, value: Any) -> Any:
        """Convert a parsed value to the column's value."""
        return value if self.write is None else self.write(value)

    def read_value(self, value: Any) -> Any:
        """Convert the column's value to the field's value."""
        return value if self.read is None else self.read(value)


# Type of a column -> the type that a parameter is sent as, and the expression that reads it.
COLUMN_TYPES = {
    "boolean": ("boolean", "{}"),
    "integer": ("int4", "{}"),
    "text": ("text", "{}"),
    "name": ("text::name", "{}"),
    '"char"': ('text::"char"', "{}::text"),
    "name[]": ("text[]::name[]", "{}::text[]"),
    "text[]": ("text[]", "{}"),
}

_STORED = (OptionStatement.CREATE, OptionStatement.SET)


@dataclass(frozen=True, slots=True)
class SubscriptionOption:
    """One row of the table: the facts about an option."""

    default: Any
    effect: str  # for the documentation, in Markdown
    since: int | None  # the first major version of PostgreSQL that has it; None: PostgreSQL does not have it
    value: OptionValue = BOOLEAN
    statements: tuple[OptionStatement, ...] = _STORED  # the statements that have it
    column: OptionColumn | None = None  # None: it is not stored
    restarts: bool = False  # a change restarts the apply worker
    default_text: str = ""  # for the documentation, if the default is not a fixed value
    since_text: str = ""  # for the documentation: values or uses that a later version has added
    on_publisher: bool = True  # the publisher needs `since`; False: the option has an effect on this side alone

    def is_supported_by(self, server_version: int) -> bool:
        """Return True if a publisher of this version (server_version_num) has the option."""
        return self.since is None or not self.on_publisher or server_version >= self.since * 10000


def _option(default: Any, effect: str, since: int | None, value: OptionValue = BOOLEAN, **more: Any) -> Any:
    """Create the dataclass field of an option. `more` are further fields of SubscriptionOption."""
    return field(default=default, metadata={"option": SubscriptionOption(default, effect, since, value, **more)})


def _write_qualified_names(names: tuple[tuple[str, str], ...]) -> list[str]:
    return [part for name in names for part in name]


def _read_qualified_names(parts: list[str]) -> tuple[tuple[str, str], ...]:
    return tuple(zip(parts[::2], parts[1::2], strict=True))


def _two_phase_state(wanted: bool) -> str:
    return (TwoPhaseState.PENDING if wanted else TwoPhaseState.DISABLED).value


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionOptions:
    """The options that the catalog stores, with PostgreSQL 18's defaults. The default of `binary` differs."""

    enabled: bool = _option(
        True,
        "Whether the launcher runs the subscription.",
        10,
        statements=(OptionStatement.CREATE,),  # ALTER SUBSCRIPTION has ENABLE and DISABLE
        column=OptionColumn("subenabled"),
    )
    slot_name: str | None = _option(
        None,
        "The slot. With `NONE` the subscription has no slot: it cannot be enabled, and `DROP SUBSCRIPTION` does not "
        "connect to the publisher.",
        10,
        OptionValue(ValueSyntax.SLOT_NAME, "name or `NONE`"),
        default_text="the subscription's name",
        column=OptionColumn("subslotname", "name"),
        restarts=True,
    )
    synchronous_commit: str = _option(
        "off",
        "The setting for the worker's transactions on the target. With `off`, only flushed transactions are confirmed.",
        10,
        OptionValue(ValueSyntax.SYNCHRONOUS_COMMIT, "`off`, `local`, `remote_write`, `remote_apply`, `on`"),
        column=OptionColumn("subsynccommit", "text"),
        restarts=True,
    )
    binary: bool | None = _option(
        None,
        "Receive values in binary format, if their types have one. Default: if every column has the same built-in "
        "type on both sides.",
        14,
        default_text="depends on the types",
        column=OptionColumn("subbinary"),
        restarts=True,
    )
    streaming: Streaming = _option(
        Streaming.PARALLEL,
        "Receive large transactions while they run, and with `parallel` also apply them while they run. Requested "
        "from publishers that support it: 14 and later, 16 and later for `parallel`.",
        14,
        OptionValue(ValueSyntax.STREAMING, "boolean or `parallel`"),
        since_text="`parallel` 16",
        column=OptionColumn("substream", '"char"', read=Streaming),
        restarts=True,
    )
    disable_on_error: bool = _option(
        False,
        "Disable the subscription after a permanent error, instead of retrying.",
        15,
        column=OptionColumn("subdisableonerr"),
    )
    password_required: bool = _option(
        True,
        "An owner that is not a superuser must connect with a password. Only superusers can set it to false.",
        16,
        column=OptionColumn("subpasswordrequired"),
        restarts=True,
    )
    run_as_owner: bool = _option(
        False,
        "Apply changes as the subscription's owner, not as the owner of each table.",
        16,
        column=OptionColumn("subrunasowner"),
        restarts=True,
    )
    origin: str = _option(
        "any",
        "`none` excludes changes that the publisher itself received by replication.",
        16,
        OptionValue(ValueSyntax.ORIGIN, "`any`, `none`"),
        column=OptionColumn("suborigin", "text"),
        restarts=True,
    )
    failover: bool = _option(
        False, "Synchronize the slot to the publisher's standbys.", 17, column=OptionColumn("subfailover")
    )
    retain_dead_tuples: bool = _option(
        False,
        "Remember deleted rows, so that a later UPDATE of one is reported as conflict `update_deleted`. Altered only "
        "while the subscription is disabled.",
        19,
        on_publisher=False,
        column=OptionColumn("subretaindeadtuples"),
        restarts=True,
    )
    max_retention_duration: int = _option(
        0,
        "The time after which a deleted row is forgotten although it could still matter. 0 means no limit.",
        19,
        OptionValue(ValueSyntax.MILLISECONDS, "milliseconds"),
        on_publisher=False,
        column=OptionColumn("submaxretention", "integer"),
    )
    conflict_policy: str = _option(
        "",
        "The reactions to conflicts.",
        None,
        OptionValue(ValueSyntax.CONFLICT_POLICY, "text"),
        column=OptionColumn("subconflictpolicy", "text"),
        restarts=True,
    )
    conflict_history: ConflictHistory = _option(
        ConflictHistory.DECIDED,
        "Which conflicts are recorded.",
        None,
        _choice(ConflictHistory),
        column=OptionColumn("subconflicthistory", "text", read=ConflictHistory),
        restarts=True,
    )
    conflict_log_rows: bool = _option(
        False,
        "Record both versions of the row with a conflict.",
        None,
        column=OptionColumn("subconflictrows"),
        restarts=True,
    )
    on_error: OnError = _option(
        OnError.RETRY,
        "The reaction to a transaction that cannot be applied. With `quarantine` it waits on the target, with the "
        "transactions that depend on it, and all others are applied.",
        None,
        _choice(OnError),
        column=OptionColumn("subonerror", "text", read=OnError),
        restarts=True,
    )
    quarantine_limit: int = _option(
        1000,
        "The number of transactions that may wait in quarantine. The next one stops the stream.",
        None,
        _number(1, 2**31 - 1),
        column=OptionColumn("subquarantinelimit", "integer"),
    )
    track_ranges: bool = _option(
        False,
        "Record which ranges of keys the stream has changed, so that `subscriber verify --since` reads only these.",
        None,
        column=OptionColumn("subtrackranges"),
        restarts=True,
    )
    copy_engine: CopyEngine = _option(
        CopyEngine.SNAPSHOT,
        "Copy each table in one snapshot, as PostgreSQL does, or in ranges of its key.",
        None,
        _choice(CopyEngine),
        column=OptionColumn("subcopyengine", "text", read=CopyEngine),
    )
    copy_indexes: CopyIndexes = _option(
        CopyIndexes.NONE,
        "With `after`, the publisher's indexes, primary keys and unique constraints that a table of the target lacks "
        "are built when its rows are copied, and its foreign keys are added when their tables are ready.",
        None,
        _choice(CopyIndexes),
        column=OptionColumn("subcopyindexes", "text", read=CopyIndexes),
    )
    apply_sessions: int = _option(
        1,
        "The number of sessions of the target that apply transactions in parallel. They commit in the publisher's "
        "order.",
        None,
        _number(1, MAX_APPLY_SESSIONS),
        column=OptionColumn("subapplysessions", "integer"),
        restarts=True,
    )
    trusted_owners: tuple[str, ...] = _option(
        (),
        "Owners of tables and functions whose code may run with all rights of the role that applies changes. For "
        "superusers only.",
        None,
        OptionValue(ValueSyntax.ROLES, "roles, separated by commas"),
        column=OptionColumn("subtrustedowners", "name[]", read=tuple, write=list),
        restarts=True,
    )
    wal_receiver_timeout: str = _option(
        "-1",
        "The time without a message from the publisher after which the connection is given up. `-1` is the setting "
        "`receiver_timeout`, 0 means no limit.",
        19,
        OptionValue(ValueSyntax.DURATION, "milliseconds, or a text with a unit"),
        on_publisher=False,
        column=OptionColumn("subwalrcvtimeout", "text"),
        restarts=True,
    )
    sequences: SequenceMode = _option(
        SequenceMode.COPY,
        "Which sequences are synchronized: `none`; with `copy` when they become part of the subscription, and by "
        "`REFRESH SEQUENCES`; with `follow` they also stay ahead of the publisher's.",
        None,
        _choice(SequenceMode),
        column=OptionColumn("subsequences", "text", read=SequenceMode),
    )
    sequence_names: tuple[tuple[str, str], ...] = _option(
        (),
        "Sequences that are synchronized although no publication has them.",
        None,
        OptionValue(ValueSyntax.SEQUENCES, "`schema.name`, separated by commas"),
        column=OptionColumn(
            "subsequencenames",
            "text[]",
            read=_read_qualified_names,
            write=_write_qualified_names,
        ),
    )
    source_tag: str = _option(
        "",
        "The rows of the target's tables that belong to the subscription, for [tables with rows of several"
        " subscriptions](../consolidating.md).",
        None,
        OptionValue(ValueSyntax.OWNERSHIP, "text"),
        column=OptionColumn("subsourcetag", "text"),
        restarts=True,
    )
    wal_budget: str = _option(
        "0",
        "The WAL that the publisher may keep for the subscription. When it keeps more, the launcher drops the slot and "
        "disables the subscription, and `subscriber reseed` continues it. 0 means no limit.",
        None,
        OptionValue(ValueSyntax.SIZE, "a text with a unit, such as `'200GB'`"),
        column=OptionColumn("subwalbudget", "text"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StatementOptions(SubscriptionOptions):
    """The options of one statement, each with the value in the statement or its default."""

    connect: bool = _option(
        True,
        "Connect to the publisher now. False creates no slot, copies no tables, and leaves the subscription disabled.",
        10,
        statements=(OptionStatement.CREATE,),
    )
    create_slot: bool = _option(
        True, "Create the replication slot on the publisher.", 10, statements=(OptionStatement.CREATE,)
    )
    copy_data: TableCopy | None = _option(
        TableCopy.COPY,
        "Copy the existing rows of the tables before changes are applied. With `compare` the target's tables have rows "
        "already, and those that differ are repaired.",
        10,
        OptionValue(ValueSyntax.COPY_DATA, "boolean or `compare`"),
        default_text="`true`",
        statements=(OptionStatement.CREATE, OptionStatement.PUBLICATION, OptionStatement.REFRESH),
    )
    truncate: bool = _option(
        False,
        "Empty the tables and copy them. False repairs the rows that differ.",
        None,
        statements=(OptionStatement.REFRESH_TABLE,),
    )
    delete_extra: bool = _option(
        False,
        "Delete rows of the target that the publisher does not have, when a table is compared. False keeps and reports"
        " them.",
        None,
        statements=(
            OptionStatement.CREATE,
            OptionStatement.PUBLICATION,
            OptionStatement.REFRESH,
            OptionStatement.REFRESH_TABLE,
        ),
    )
    refresh: bool = _option(
        True, "Refresh the subscription's tables immediately.", 10, statements=(OptionStatement.PUBLICATION,)
    )
    # A Boolean in statements, and a state in the catalog.
    two_phase: bool = _option(
        False,
        "Prepare transactions on the target when they are prepared on the publisher.",
        15,
        since_text="altered since 18",
        column=OptionColumn(
            "subtwophasestate",
            '"char"',
            has_states=True,
            read=TwoPhaseState,
            write=_two_phase_state,
        ),
    )
    lsn: Lsn = _option(  # 0: NONE
        Lsn(0),
        "For `SKIP`: skip the transaction that finished at this position.",
        15,
        OptionValue(ValueSyntax.LSN, "position or `NONE`"),
        default_text="required",
        statements=(OptionStatement.SKIP,),
    )
    specified: frozenset[str] = frozenset()  # the options that the statement had


OPTIONS: Mapping[str, SubscriptionOption] = MappingProxyType(
    {
        declared.name: declared.metadata["option"]
        for declared in fields(StatementOptions)
        if "option" in declared.metadata
    }
)
STORED_OPTIONS: Mapping[str, OptionColumn] = MappingProxyType(
    {name: option.column for name, option in OPTIONS.items() if option.column is not None}
)


@dataclass(frozen=True, slots=True)
class Subscription(SubscriptionOptions):
    """A subscription: one row of `subscriber.subscription`.

    `slot_name` is None after `slot_name = NONE`. `binary` is None if no statement has set it. `conflict_policy` has the
    user's text. It is empty if PostgreSQL's rules apply to conflicts.
    """

    oid: int
    name: str
    owner: str  # role name
    # The user's text, URI or key=value, or that of the foreign server; None: the foreign server gives none.
    stored_conninfo: str | None = field(repr=False)
    publications: tuple[str, ...]
    two_phase: TwoPhaseState = TwoPhaseState.DISABLED  # the state of the option `two_phase`
    skip_lsn: Lsn = Lsn(0)  # 0: nothing to skip
    owner_is_superuser: bool = True
    system_id: str | None = None  # the publisher's system identifier; None: unknown until the next connection
    timeline: int | None = None  # the publisher's timeline; None: unknown until the next connection
    timeline_system: str | None = None  # the system identifier that the timeline belongs to
    timeline_history: str | None = None  # the ends of earlier timelines; None: of a standby, or unknown
    accepts_loss: bool = False  # the next connection accepts a publisher that lacks applied changes
    server: str | None = None  # the foreign server that has the connection string
    conninfo_problem: str | None = None  # the reason why the foreign server gives no connection string
    version: str = ""  # of the row; changes with each statement on the subscription
    disabled_at: datetime | None = None  # by the target's clock; None: it is enabled
    gave_up: str | None = None  # the reason why the launcher has dropped the slot; None: it has not
    generation: int = 0  # of the settings; changes with each statement that restarts the worker

    @property
    def conninfo(self) -> str:
        """The connection string of the publisher.

        Raises:
            PublisherError: The foreign server of the subscription gives none.
        """
        if self.stored_conninfo is None:
            raise PublisherError(
                self.conninfo_problem or "no connection string provided for subscription",
                hint=f'Correct foreign server "{self.server}" or the user mapping of role "{self.owner}". Or: ALTER'
                f" SUBSCRIPTION {sql_identifier(self.name)} CONNECTION '…';",
                sqlstate=UNDEFINED_OBJECT,
            )
        return self.stored_conninfo

    @property
    def ownership(self) -> OwnershipRules:
        """The rules of `source_tag`."""
        return parse_ownership(self.source_tag)

    def receiver_timeout(self, default: float) -> float:
        """Return `wal_receiver_timeout` in seconds; infinity for 0, and `default` for -1 or a text that is none."""
        if self.wal_receiver_timeout == "-1":
            return default
        try:
            return parse_milliseconds(self.wal_receiver_timeout) / 1000 or inf
        except ValueError:  # not written by a statement
            return default

    @property
    def wal_budget_bytes(self) -> int | None:
        """`wal_budget` in bytes; None: there is no limit, or the text is none."""
        try:
            return parse_size(self.wal_budget) or None
        except ValueError:  # not written by a statement
            return None

    @property
    def must_use_password(self) -> bool:
        """True if connections to the publisher must use the password of `conninfo`, and no other identity."""
        return self.password_required and not self.owner_is_superuser

    @property
    def decides_conflicts(self) -> bool:
        """True if each change has to be compared with the target's row, and changes are applied in commit order."""
        return bool(self.conflict_policy) or self.conflict_history is ConflictHistory.ALL

    @property
    def origin_name(self) -> str:
        """The replication origin of the apply worker on the target."""
        return apply_origin(self.oid)
