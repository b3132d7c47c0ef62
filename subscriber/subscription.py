"""A subscription as the catalog stores it, and the one table of its options, by PostgreSQL's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Literal

from subscriber.lsn import Lsn


class Streaming(StrEnum):
    """`pg_subscription.substream`; the values are the catalog's letters."""

    OFF = "f"
    ON = "t"
    PARALLEL = "p"

    @property
    def option(self) -> Literal["off", "on", "parallel"]:
        """As CREATE SUBSCRIPTION and START_REPLICATION spell it."""
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
    """Which conflicts are recorded in `subscriber.conflict_history`."""

    NONE = "none"
    DECIDED = "decided"  # what a policy decided, and what stopped the stream
    ALL = "all"  # rows that were missing or written by others as well, at the price of waiting for answers


class CopyEngine(StrEnum):
    """Who makes the initial copy of tables."""

    AUTO = "auto"  # Spark, if it is installed and the tables are large
    ASYNCIO = "asyncio"  # the launcher, table by table, as PostgreSQL does
    SPARK = "spark"  # subscriber copy, with all tables in parts


@dataclass(frozen=True, slots=True)
class StoredOption:
    """How an option of CREATE SUBSCRIPTION is stored, and what a change of it means."""

    column: str  # of subscriber.subscription
    type: str  # of the column, as SQL; one of COLUMN_TYPES
    about: str  # what the catalog's documentation says of the column
    restarts: bool  # a change restarts the apply worker; the column belongs to the trigger next_generation then
    alterable: bool = True  # ALTER SUBSCRIPTION … SET writes the column
    column_default: str | None = None  # as SQL
    null: bool = False
    read: Callable[[Any], Any] | None = None  # from the column's value to the field's; None: they are the same
    write: Callable[[Any], Any] | None = None  # from the parsed value to the column's; None: they are the same

    @property
    def parameter(self) -> str:
        """The type that a value is sent as. asyncpg needs no codec of its own then."""
        return COLUMN_TYPES[self.type][0]

    def write_value(self, value: Any) -> Any:
        """The column's value for a parsed one."""
        return value if self.write is None else self.write(value)

    def read_value(self, value: Any) -> Any:
        """The field's value for the column's."""
        return value if self.read is None else self.read(value)

    @property
    def selected(self) -> str:
        """The column in a SELECT list of table `s`."""
        return COLUMN_TYPES[self.type][1].format(f"s.{self.column}") + f" AS {self.column}"


# Type of a column -> the type that a parameter is sent as, and the expression that reads it.
COLUMN_TYPES = {
    "boolean": ("boolean", "{}"),
    "integer": ("int4", "{}"),
    "text": ("text", "{}"),
    "name": ("text::name", "{}"),
    '"char"': ('text::"char"', "{}::text"),
    "name[]": ("text[]::name[]", "{}::text[]"),
}


def _option(default: Any, column: str, type_: str, *, restarts: bool = False, **how: Any) -> Any:
    """A field of Subscription that is an option; `how`: the further fields of StoredOption."""
    return field(default=default, metadata={"option": (column, type_, restarts, how)})


def _two_phase_state(wanted: bool) -> str:
    return (TwoPhaseState.PENDING if wanted else TwoPhaseState.DISABLED).value


@dataclass(frozen=True, slots=True)
class Subscription:
    """One row of `subscriber.subscription`. Field comments say what None and empty mean.

    The fields made by `_option()` are the table of options: OPTIONS. The parser, the statements of the catalog, its
    table, and the rule that restarts a worker follow from it.
    """

    oid: int
    name: str
    owner: str  # role name
    conninfo: str = field(repr=False)  # as the user wrote it: URI or key=value
    publications: tuple[str, ...]
    enabled: bool = _option(True, "subenabled", "boolean", alterable=False, about="whether it is to run")
    slot_name: str | None = _option(  # None: SET (slot_name = NONE)
        None,
        "subslotname",
        "name",
        restarts=True,
        null=True,
        about="the slot on the publisher; NULL: `slot_name = NONE`",
    )
    synchronous_commit: str = _option("off", "subsynccommit", "text", restarts=True)
    binary: bool | None = _option(  # None: not said; binary as long as every table's types allow it
        None, "subbinary", "boolean", restarts=True, null=True, about="`binary`; NULL: not said"
    )
    streaming: Streaming = _option(
        Streaming.PARALLEL,
        "substream",
        '"char"',
        restarts=True,
        read=Streaming,
        about="`streaming`: f off, t on, p parallel",
    )
    two_phase: TwoPhaseState = _option(  # ALTER SUBSCRIPTION moves it from state to state
        TwoPhaseState.DISABLED,
        "subtwophasestate",
        '"char"',
        alterable=False,
        read=TwoPhaseState,
        write=_two_phase_state,
        about="`two_phase`: d disabled, p pending until all tables are there, e enabled",
    )
    disable_on_error: bool = _option(False, "subdisableonerr", "boolean")
    password_required: bool = _option(True, "subpasswordrequired", "boolean", restarts=True)
    run_as_owner: bool = _option(False, "subrunasowner", "boolean", restarts=True)
    origin: str = _option("any", "suborigin", "text", restarts=True)  # any or none
    failover: bool = _option(False, "subfailover", "boolean")
    skip_lsn: Lsn = Lsn(0)  # 0: nothing to skip
    owner_is_superuser: bool = True
    system_id: str | None = None  # the publisher's system identifier; None: unknown until the next connection
    timeline: int | None = None  # the publisher's; None: unknown until the next connection
    timeline_system: str | None = None  # the system identifier that the timeline belongs to
    version: str = ""  # of the row: another one after each statement about it
    generation: int = 0  # of the settings: another one after each statement that restarts the worker
    # As the user wrote it; empty: what PostgreSQL does.
    conflict_policy: str = _option("", "subconflictpolicy", "text", restarts=True, column_default="''")
    conflict_history: ConflictHistory = _option(
        ConflictHistory.DECIDED,
        "subconflicthistory",
        "text",
        restarts=True,
        read=ConflictHistory,
        column_default="'decided'",
    )
    conflict_log_rows: bool = _option(False, "subconflictrows", "boolean", restarts=True, column_default="false")
    copy_engine: CopyEngine = _option(
        CopyEngine.AUTO, "subcopyengine", "text", read=CopyEngine, column_default="'auto'"
    )
    # Roles whose code may run with the rights of the session's role.
    trusted_owners: tuple[str, ...] = _option(
        (), "subtrustedowners", "name[]", restarts=True, read=tuple, write=list, column_default="'{}'::name[]"
    )
    # Of the target, in which transactions are applied side by side.
    apply_sessions: int = _option(1, "subapplysessions", "integer", restarts=True, column_default="1")

    @property
    def must_use_password(self) -> bool:
        """Whether every connection to the publisher must use the password of `conninfo`, and no identity of ours."""
        return self.password_required and not self.owner_is_superuser

    @property
    def decides_conflicts(self) -> bool:
        """Whether changes have to look at the target before they are applied, one after the other in commit order."""
        return bool(self.conflict_policy) or self.conflict_history is ConflictHistory.ALL

    @property
    def origin_name(self) -> str:
        """The replication origin of the apply worker on the target."""
        return f"pg_{self.oid}"


def _options() -> dict[str, StoredOption]:
    found = {}
    for one in fields(Subscription):
        if "option" in one.metadata:
            column, type_, restarts, how = one.metadata["option"]
            found[one.name] = StoredOption(column, type_, restarts=restarts, **({"about": f"`{one.name}`"} | how))
    return found


OPTIONS: Mapping[str, StoredOption] = MappingProxyType(_options())  # by the option's name
