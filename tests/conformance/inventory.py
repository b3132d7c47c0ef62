"""The files of src/test/subscription/t in PostgreSQL 18 and 19: the subject, and the reason if it does not pass."""

from __future__ import annotations

ABOUT = {
    "001_rep_changes": "changes of tables with every replica identity, publications altered, cleanup",
    "002_types": "arrays, ranges, composites, domains, enums, hstore",
    "003_constraints": "foreign keys, CHECK, triggers that fire",
    "004_sync": "the initial copy, repeated after errors, tables added later",
    "005_encoding": "databases in different encodings",
    "006_rewrite": "tables rewritten by DDL on the publisher",
    "007_ddl": "errors and warnings of the statements",
    "008_diff_schema": "columns in another order or of other types, additional and missing columns",
    "009_matviews": "materialized views on the publisher",
    "010_truncate": "TRUNCATE, also synchronously and by two subscriptions",
    "011_generated": "generated columns on either side",
    "012_collation": "nondeterministic collations (with ICU)",
    "013_partition": "partitioned tables on either side",
    "014_binary": "binary transfer and copy",
    "015_stream": "large transactions in progress",
    "016_stream_subxact": "subtransactions of streamed transactions",
    "017_stream_ddl": "DDL in streamed transactions",
    "018_stream_subxact_abort": "subtransactions rolled back in streamed transactions",
    "019_stream_subxact_ddl_abort": "DDL and rollbacks in streamed transactions",
    "020_messages": "logical messages",
    "021_twophase": "prepared transactions",
    "022_twophase_cascade": "prepared transactions through a second server",
    "023_twophase_stream": "large prepared transactions",
    "024_add_drop_pub": "publications added and dropped",
    "025_rep_changes_for_schema": "publications of whole schemas",
    "026_stats": "counters of errors and conflicts",
    "027_nosuperuser": "owners without superuser rights, row security, passwords",
    "028_row_filter": "row filters",
    "029_on_error": "disable_on_error, and SKIP of a transaction that cannot be applied",
    "030_origin": "two-way replication without loops",
    "031_column_list": "column lists",
    "032_subscribe_use_index": "the index that finds a row under REPLICA IDENTITY FULL",
    "033_run_as_table_owner": "the role that applies changes",
    "034_temporal": "keys WITHOUT OVERLAPS",
    "035_conflicts": "conflicts with several unique indexes",
    "036_sequences": "sequences synchronized, refreshed, mismatched and missing",
    "037_except": "publications of all tables except some",
    "038_walsnd_shutdown_timeout": "a publisher that shuts down while a subscriber does not receive",
    "100_bugs": "bugs of earlier versions",
}

# Files that cannot pass unchanged, with the feature that only a process inside the server has.
INSIDE = {
    "035_conflicts": "since 19, VACUUM keeps dead rows for slot `pg_conflict_detection` of the target",
}

# Files for features that this program does not have yet.
NOT_YET: dict[str, str] = {}
