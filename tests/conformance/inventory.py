"""The files of src/test/subscription/t in PostgreSQL 18: the subject of each, and the reason if it does not pass."""

from __future__ import annotations

ABOUT = {
    "001_rep_changes": "changes of tables with every replica identity, publications altered, clearing up",
    "002_types": "arrays, ranges, composites, domains, enums, hstore",
    "003_constraints": "foreign keys, CHECK, triggers that fire",
    "004_sync": "the initial copy, repeated after errors, tables added later",
    "005_encoding": "databases in different encodings",
    "006_rewrite": "tables rewritten by DDL on the publisher",
    "007_ddl": "errors and warnings of the statements",
    "008_diff_schema": "columns in another order, of other types, more of them, missing",
    "009_matviews": "materialized views on the publisher",
    "010_truncate": "TRUNCATE, also synchronously and by two subscriptions",
    "011_generated": "generated columns on either side",
    "012_collation": "nondeterministic collations (with ICU)",
    "013_partition": "partitioned tables on either side",
    "014_binary": "binary transfer and copy",
    "015_stream": "large transactions while they run",
    "016_stream_subxact": "their subtransactions",
    "017_stream_ddl": "DDL in them",
    "018_stream_subxact_abort": "subtransactions rolled back in them",
    "019_stream_subxact_ddl_abort": "DDL and rollbacks in them",
    "020_messages": "logical messages",
    "021_twophase": "prepared transactions",
    "022_twophase_cascade": "prepared transactions by way of a second server",
    "023_twophase_stream": "large prepared transactions",
    "024_add_drop_pub": "publications added and dropped",
    "025_rep_changes_for_schema": "publications of whole schemas",
    "026_stats": "counters of errors and conflicts",
    "027_nosuperuser": "owners that are no superusers, row security, passwords",
    "028_row_filter": "row filters",
    "029_on_error": "disable_on_error, and SKIP of what could not be applied",
    "030_origin": "both ways without loops",
    "031_column_list": "column lists",
    "032_subscribe_use_index": "which index finds a row under REPLICA IDENTITY FULL",
    "033_run_as_table_owner": "as whom changes are applied",
    "034_temporal": "keys WITHOUT OVERLAPS",
    "035_conflicts": "conflicts with several unique indexes",
    "100_bugs": "what has once been wrong",
}

# Files that cannot pass unchanged, with the feature that only a process inside the server has.
INSIDE: dict[str, str] = {}

# Files for features that this program does not have yet.
NOT_YET: dict[str, str] = {}
