"""A subscription as the catalog stores it: the options of CREATE SUBSCRIPTION, by PostgreSQL's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

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
class Subscription:
    """One row of `subscriber.subscription`. Field comments say what None and empty mean."""

    oid: int
    name: str
    owner: str  # role name
    conninfo: str = field(repr=False)  # as the user wrote it: URI or key=value
    publications: tuple[str, ...]
    enabled: bool = True
    slot_name: str | None = None  # None: SET (slot_name = NONE)
    synchronous_commit: str = "off"
    binary: bool | None = None  # None: not said; binary as long as every table's types allow it
    streaming: Streaming = Streaming.PARALLEL
    two_phase: TwoPhaseState = TwoPhaseState.DISABLED
    disable_on_error: bool = False
    password_required: bool = True
    run_as_owner: bool = False
    origin: str = "any"  # any or none
    failover: bool = False
    skip_lsn: Lsn = Lsn(0)  # 0: nothing to skip
    owner_is_superuser: bool = True
    system_id: str | None = None  # the publisher's system identifier; None: unknown until the next connection
    timeline: int | None = None  # the publisher's; None: unknown until the next connection
    timeline_system: str | None = None  # the system identifier that the timeline belongs to
    version: str = ""  # of the row: another one after each statement about it
    generation: int = 0  # of the settings: another one after each statement that the worker is started anew for
    conflict_policy: str = ""  # as the user wrote it; empty: what PostgreSQL does
    conflict_history: ConflictHistory = ConflictHistory.DECIDED
    conflict_log_rows: bool = False
    copy_engine: CopyEngine = CopyEngine.AUTO
    trusted_owners: tuple[str, ...] = ()  # roles whose code may run with the rights of the session's role
    apply_sessions: int = 1  # of the target, in which transactions are applied side by side

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
