"""The options of typed statements, written by tools/option_types.py from subscription.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict


class CreateOptionValues(TypedDict, total=False):
    """The options of Database.create_subscription()."""

    enabled: bool
    slot_name: str | None
    synchronous_commit: Literal["off", "local", "remote_write", "remote_apply", "on"]
    binary: bool
    streaming: bool | Literal["off", "on", "parallel"]
    disable_on_error: bool
    password_required: bool
    run_as_owner: bool
    origin: Literal["any", "none"]
    failover: bool
    retain_dead_tuples: bool
    max_retention_duration: int
    conflict_policy: str
    conflict_history: Literal["none", "decided", "all"]
    conflict_log_rows: bool
    on_error: Literal["retry", "quarantine"]
    quarantine_limit: int
    track_ranges: bool
    copy_engine: Literal["snapshot", "ranges"]
    copy_indexes: Literal["none", "after"]
    apply_sessions: int
    trusted_owners: Sequence[str]
    wal_receiver_timeout: int | str
    sequences: Literal["none", "copy", "follow"]
    sequence_names: Sequence[tuple[str, str]]
    source_tag: str
    wal_budget: str
    connect: bool
    create_slot: bool
    copy_data: bool | Literal["compare"]
    delete_extra: bool
    two_phase: bool


class AlterOptionValues(TypedDict, total=False):
    """The options of Database.alter()."""

    slot_name: str | None
    synchronous_commit: Literal["off", "local", "remote_write", "remote_apply", "on"]
    binary: bool
    streaming: bool | Literal["off", "on", "parallel"]
    disable_on_error: bool
    password_required: bool
    run_as_owner: bool
    origin: Literal["any", "none"]
    failover: bool
    retain_dead_tuples: bool
    max_retention_duration: int
    conflict_policy: str
    conflict_history: Literal["none", "decided", "all"]
    conflict_log_rows: bool
    on_error: Literal["retry", "quarantine"]
    quarantine_limit: int
    track_ranges: bool
    copy_engine: Literal["snapshot", "ranges"]
    copy_indexes: Literal["none", "after"]
    apply_sessions: int
    trusted_owners: Sequence[str]
    wal_receiver_timeout: int | str
    sequences: Literal["none", "copy", "follow"]
    sequence_names: Sequence[tuple[str, str]]
    source_tag: str
    wal_budget: str
    two_phase: bool
