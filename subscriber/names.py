"""Names that a subscription gives to objects on both servers: replication origins, slots, prepared transactions.

They are PostgreSQL's own: `pg_<subid>` and `pg_<subid>_<relid>` are origins, `pg_<subid>_sync_<relid>_<system
identifier>` is a slot, `pg_gid_<subid>_<xid>` is a prepared transaction, `pg_sp_<subid>_<xid>` is a savepoint.

An origin belongs to one session at a time, so each parallel apply worker has its own, `pg_<subid>_<n>` with n from 1:
no table's OID is below 16384. PostgreSQL 19 can share an origin, but then no session can set it up after the first one
has ended, until all others have ended.
"""

from __future__ import annotations

import re


def apply_origin(subid: int) -> str:
    """Return the origin of a subscription's apply worker."""
    return f"pg_{subid}"


def table_sync_origin(subid: int, relid: int) -> str:
    """Return the origin of the worker that synchronizes target table `relid`, or of parallel apply worker `relid`."""
    return f"pg_{subid}_{relid}"


def origin_pattern(subid: int) -> str:
    """Return the regular expression, as PostgreSQL reads it, of all origins of a subscription."""
    return f"^pg_{subid}(_[0-9]+)?$"


def table_sync_slot(subid: int, relid: int, sync_id: str) -> str:
    """Return the publisher's slot for a table synchronization; `sync_id` is the target's (catalog/identity.py)."""
    return f"{table_sync_slot_prefix(subid)}{relid}_{sync_id}"


def table_sync_slot_prefix(subid: int) -> str:
    """Return the prefix of all slots for table synchronization of a subscription."""
    return f"pg_{subid}_sync_"


def table_of_sync_slot(slot: str, subid: int, sync_id: str) -> int | None:
    """Return the number in the name of a slot for table synchronization; None for any other slot."""
    match = re.fullmatch(f"{table_sync_slot_prefix(subid)}([0-9]{{1,10}})_{re.escape(sync_id)}", slot, re.ASCII)
    return int(match[1]) if match else None


def sequence_sync_name(subid: int, sync_id: str) -> str:
    """Return the application_name of the publisher session that synchronizes sequences."""
    return f"pg_{subid}_sequence_sync_{sync_id}"


def prepared_prefix(subid: int) -> str:
    """Return the prefix of all transactions that a subscription has prepared on the target."""
    return f"pg_gid_{subid}_"


def prepared_gid(subid: int, xid: int) -> str:
    """Return the name under which the publisher's transaction `xid` is prepared on the target."""
    return f"{prepared_prefix(subid)}{xid}"


def is_prepared_gid(gid: str, subid: int) -> bool:
    """Return True if `gid` has the form of prepared_gid().

    A session that may prepare transactions on the target chooses any name for them, also one with our prefix.
    """
    return re.fullmatch(f"{prepared_prefix(subid)}[0-9]{{1,10}}", gid, re.ASCII) is not None


def subtransaction_savepoint(subid: int, xid: int) -> str:
    """Return the savepoint at which subtransaction `xid` of a streamed transaction begins; it needs no quotes."""
    return f"pg_sp_{subid}_{xid}"
