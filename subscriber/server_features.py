"""The features of PostgreSQL that depend on the server's version, each with the first major version that has it.

    if features.COLUMN_LISTS.is_in(session.server_version):
        ...

No other module compares a version with a number, except for the words of a message (server_version.py) and for defects
of minor releases. A new version of PostgreSQL needs an entry here for each feature that the package uses.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature of the server.

    Attributes:
        since: the first major version with the feature.
        what: the feature, in a few words.
    """

    since: int
    what: str

    def is_in(self, server_version: int) -> bool:
        """Return True if a server has the feature. `server_version` is its server_version_num, such as 180006."""
        return server_version >= self.since * 10_000

    def is_in_major(self, major: int) -> bool:
        """Return True if servers of a major version have the feature."""
        return major >= self.since


# Logical decoding and slots.
LOGICAL_REPLICATION = Feature(10, "publications and pgoutput")
STREAMING = Feature(14, "protocol 2: transactions that are streamed while they run")
DECODED_MESSAGES = Feature(14, "logical decoding messages in the stream")
SLOT_STATISTICS = Feature(14, "pg_stat_replication_slots")
TWO_PHASE_DECODING = Feature(15, "protocol 3: transactions that are sent when they are prepared")
SLOT_OPTIONS_IN_PARENTHESES = Feature(15, "CREATE_REPLICATION_SLOT … (…)")
PARALLEL_STREAMING = Feature(16, "protocol 4: what a parallel worker needs to abort a streamed transaction")
ORIGIN_FILTER = Feature(16, "origin = none in the stream")
DECODING_STANDBY = Feature(16, "logical slots on standbys")
FAILOVER_SLOTS = Feature(17, "slots that are synchronized to standbys")
SLOT_SYNC_STATISTICS = Feature(19, "mem_exceeded_count, and why a slot is not synchronized")

# Publications, tables and their definitions.
PUBLISHED_TRUNCATE = Feature(11, "pubtruncate")
INHERITED_FOREIGN_KEYS = Feature(11, "pg_constraint.conparentid")
PARTITION_TREES = Feature(12, "pg_partition_tree()")
GENERATED_COLUMNS = Feature(12, "pg_attribute.attgenerated")
SNAPSHOT_FUNCTIONS = Feature(13, "pg_current_snapshot()")
COLUMN_COMPRESSION = Feature(14, "pg_attribute.attcompression")
SQL_BODIES = Feature(14, "functions with a body in SQL")
TID_RANGE_SCANS = Feature(14, "scans of a range of ctid")
HASHED_RECORDS = Feature(14, "hash functions of records")
COLUMN_LISTS = Feature(15, "column lists, row filters, and schemas in publications")
FOREIGN_KEY_SET_COLUMNS = Feature(15, "ON DELETE SET NULL (columns)")
NULLS_NOT_DISTINCT = Feature(15, "unique indexes with NULLS NOT DISTINCT")
DATABASE_LOCALE_PROVIDER = Feature(15, "the provider and the version of a database's collation")
PUBLIC_OWNER = Feature(15, "pg_database_owner as the owner of schema public")
PUBLISHED_TOGETHER = Feature(16, "pg_get_publication_tables() of several publications")
BINARY_COPY = Feature(16, "the initial copy in binary")
INPUT_CHECK = Feature(16, "pg_input_is_valid()")
DATABASE_LOCALE = Feature(17, "pg_database.datlocale")
PUBLISHED_GENERATED_COLUMNS = Feature(18, "generated columns in publications")
TEMPORAL_FOREIGN_KEYS = Feature(18, "foreign keys with PERIOD, and those that are not enforced")
DUMPED_STATISTICS = Feature(18, "statistics in dumps of pg_dump")
PUBLICATION_EXCEPTIONS = Feature(19, "FOR ALL TABLES EXCEPT")
PUBLISHED_SEQUENCES = Feature(19, "sequences in publications and subscriptions")
REFRESH_SEQUENCES = Feature(19, "two kinds of ALTER SUBSCRIPTION … REFRESH, which messages tell apart")

# Settings, roles and rights.
JIT = Feature(11, "jit")
IDLE_SESSION_TIMEOUT = Feature(14, "idle_session_timeout")
COMMIT_ORIGINS = Feature(14, "the origin of a row's transaction beside its commit time")
GRANT_SET = Feature(15, "GRANT SET ON PARAMETER")
MEMBERSHIP_OPTIONS = Feature(16, "GRANT … WITH INHERIT, SET")
LIMITED_CREATEROLE = Feature(16, "CREATEROLE manages only roles that it may administer")
CREATE_SUBSCRIPTION_ROLE = Feature(16, "pg_create_subscription")
TRANSACTION_TIMEOUT = Feature(17, "transaction_timeout")
MAINTAIN = Feature(17, "the privilege MAINTAIN")
RESTRICTED_RELATION_KINDS = Feature(17, "restrict_nonsystem_relation_kind, also in minor releases of 12 to 16")

# The privilege by which a role may become another one, for pg_has_role() in a query for servers of all versions.
MAY_SET_ROLE = (
    "CASE WHEN pg_catalog.current_setting('server_version_num')::pg_catalog.int4"
    f" >= {MEMBERSHIP_OPTIONS.since * 10_000} THEN 'SET' ELSE 'MEMBER' END"
)


def set_role_privilege(major: int) -> str:
    """Return the privilege by which a role may become another one, for pg_has_role() on servers of a major version."""
    return "SET" if MEMBERSHIP_OPTIONS.is_in_major(major) else "MEMBER"
