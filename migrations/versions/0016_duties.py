"""Privileges by duty. PUBLIC may only read the views.

    owner       of subscriptions: statements, `subscriber copy` and `verify`; policies show a role only its own
    launcher    runs subscriptions
    apply       a session that applies changes: no table, only functions that check the fence of a worker

admit(role, duty) grants a duty, dismiss(role, duty) revokes it. Both are for the schema's owner.
"""

from __future__ import annotations

from alembic import op

revision = "0016"
down_revision = "0015"

READ = ("progress_record", "progress", "prepared", "session", "launcher", "identity")
WRITE = (
    "subscription_rel",
    "worker",
    "subscription_stats",
    "conflict_history",
    "bulk_copy",
    "bulk_copy_rel",
    "copy_done",
    "hold",
)
# Without the owner, the columns that only a superuser sets, and the number of the row's large object.
COLUMNS = (
    "subname, subenabled, subconninfo, subslotname, subsynccommit, subpublications, subbinary, substream,"
    " subtwophasestate, subdisableonerr, subrunasowner, suborigin, subfailover, subskiplsn, subconflictpolicy,"
    " subconflicthistory, subconflictrows, subcopyengine, subapplysessions, subsystemid, subtimeline,"
    " subtimelinesystem"
)
FOREIGN_CODE = (
    "is_trusted(oid, name[])",
    "exceeds(oid)",
    "code_in(text)",
    "types_in(text)",
    "types_within(oid)",
    "functions_of_opclass(oid)",
    "code_of_type(oid)",
    "is_harmless(oid)",
    "code_of_expression(text, oid, boolean)",
    "foreign_code(oid, name[], boolean, name)",
    "table_safety(oid, name[], boolean, name)",
    "guarded_shape(oid, text, name[])",
)
OWNER_FUNCTIONS = (
    "new_subscription_oid()",
    "new_record()",
    "new_record_of_many()",
    "new_id()",
    "create_origin(text)",
    "drop_origin(text)",
    "origin_progress(text)",
    "terminate_workers(oid, oid)",
    "terminate_session(oid, integer)",
    "register_session(oid, oid, integer, timestamptz, oid)",
    "release_session(oid, oid, integer)",
    "living_sessions(oid)",
    "set_owner(oid, oid)",
    "set_progress(oid, oid, pg_lsn)",
    "remove_progress(oid, oid)",
    "set_confirmed(oid, pg_lsn)",
    "read_position(oid)",
    "read_confirmed(oid)",
    "prepared_transactions()",
    "forget_prepared(oid)",
    "record_conflict_error(oid, jsonb)",
    "present_identity()",
    "adopt_timeline()",
    "renumber(oid, oid[], oid[])",
    "follow_names(oid)",
    "restore()",
    "table_shape(oid, text)",
    *FOREIGN_CODE,
)
LAUNCHER_FUNCTIONS = (
    "lead(text, integer, timestamptz, oid, interval)",
    "renew_lead(text, integer)",
    "resign(text, integer)",
    "claim_progress(oid, oid)",
)
APPLY_FUNCTIONS = (
    "advance(oid, bytea, pg_lsn, pg_lsn, timestamptz, boolean)",
    "finish_copy(oid, bytea, pg_lsn)",
    "clear_skip(oid, bytea, pg_lsn)",
    "record_conflict(oid, bytea, jsonb)",
    "mark_prepared(oid, bytea, bigint, text)",
    "note_prepared(oid, bytea, bigint, text, text, pg_lsn, timestamptz)",
    "find_prepared(oid, bytea, bigint)",
    "forget_prepared(oid, bytea, bigint)",
    "become_replica()",
    "bind_origin(oid, bytea, oid)",
    "release_origin()",
    "set_origin(oid, bytea, pg_lsn, timestamptz)",
    "claim_parts(bigint, bytea, oid[], integer[])",
    "record_parts(bigint, bytea, oid[], integer[], bigint[], bigint[])",
    "table_shape(oid, text)",
    "raise_error(text, text)",
    *FOREIGN_CODE,
)


def _tables(names: tuple[str, ...]) -> str:
    return ", ".join(f"subscriber.{name}" for name in names)


OWNER = (
    f"SELECT ON {_tables(('subscription', *READ, *WRITE))}",
    f"INSERT, UPDATE, DELETE ON {_tables(WRITE)}",
    f"INSERT ({COLUMNS}, subowner, subpasswordrequired), UPDATE ({COLUMNS}), DELETE ON subscriber.subscription",
    f"EXECUTE ON FUNCTION {_tables(OWNER_FUNCTIONS)}",
)
LAUNCHER = f"EXECUTE ON FUNCTION {_tables(LAUNCHER_FUNCTIONS)}"


def change(name: str, verb: str, preposition: str, *, more: tuple[str, ...] = ()) -> str:
    """Return a function that grants or revokes the privileges of a duty. `more` are later functions of duty "apply"."""
    apply = (f"EXECUTE ON FUNCTION {_tables((*APPLY_FUNCTIONS, *more))}",)
    duties = {"owner": OWNER, "launcher": (LAUNCHER, *OWNER, *apply), "apply": apply}
    cases = "\n".join(
        f"            WHEN '{duty}' THEN\n"
        + "\n".join(
            f"                EXECUTE pg_catalog.format('{verb} {privilege} {preposition} %I', role);"
            for privilege in privileges
        )
        for duty, privileges in duties.items()
    )
    return f"""
    CREATE FUNCTION subscriber.{name}(role text, duty text) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        CASE duty
{cases}
            ELSE
                RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
                    MESSAGE = pg_catalog.format('there is no duty "%s"', duty),
                    HINT = 'Duties are {", ".join(duties)}.';
        END CASE;
    END $$
    """


# Everybody may read pg_subscription and similar views, as in PostgreSQL.
PUBLIC = (
    "REVOKE ALL ON ALL TABLES IN SCHEMA subscriber FROM PUBLIC",
    "REVOKE ALL ON ALL SEQUENCES IN SCHEMA subscriber FROM PUBLIC",
    "REVOKE ALL ON ALL FUNCTIONS IN SCHEMA subscriber FROM PUBLIC",
    *[
        f"GRANT SELECT ON subscriber.{view} TO PUBLIC"
        for view in (
            "pg_subscription",
            "pg_subscription_rel",
            "pg_stat_subscription",
            "pg_stat_subscription_stats",
            "alembic_version",
            "complete",
        )
    ],
)
PRESENT_OWNERS = """
SELECT subscriber.admit(r.rolname::text, 'owner') FROM pg_catalog.pg_roles r
 WHERE r.rolname = 'pg_create_subscription'
    OR NOT r.rolsuper AND r.oid IN (SELECT s.subowner FROM subscriber.subscription s)
"""
POLICIES = [
    *[f"ALTER TABLE subscriber.{table} ENABLE ROW LEVEL SECURITY" for table in ("progress_record", "session")],
    *[
        f"""
        CREATE POLICY follow ON subscriber.{table}
        USING (EXISTS (SELECT FROM subscriber.subscription s WHERE s.subid = {table}.subid))
        """
        for table in ("progress_record", "session")
    ],
]


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    for statement in [*PUBLIC, *POLICIES]:
        op.execute(statement)
    for name, verb, preposition in (("admit", "GRANT", "TO"), ("dismiss", "REVOKE", "FROM")):
        op.execute(change(name, verb, preposition))
        op.execute(f"REVOKE ALL ON FUNCTION subscriber.{name}(text, text) FROM PUBLIC")
    op.execute(PRESENT_OWNERS)
