"""Rules that ask one server. A rule is a query, and a function that makes the finding of each row.

Each query returns the name of the object first, in the form in which findings show it, and further columns for the
function. A query can have one parameter: the slots of the move itself, which are not findings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from subscriber.display import sql_identifier, sql_literal, sql_name
from subscriber.formatting import count, in_bytes
from subscriber.migration.preflight.model import FixedOn, PreflightFinding, Severity
from subscriber.publisher.own_schema import IS_OURS, IS_OWN_NAME, OWN_SCHEMA


class Found(NamedTuple):
    """A row of a rule's query as message and fix."""

    message: str
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class ServerRule:
    """A rule about one server.

    Attributes:
        kind: the first part of the names of its findings.
        side: the server that is asked, and fixed.
        severity: of its findings.
        why: the consequence.
        query: returns the object, then the arguments of `found`.
        found: makes message and fix of a row, without its first column.
        since: the first major version with the catalogs of the query.
        needs: a table of an extension, without which the rule does not apply.
    """

    kind: str
    side: FixedOn
    severity: Severity
    why: str
    query: str
    found: Callable[..., Found]
    since: int = 0
    needs: str | None = None

    def finding(self, row: Any) -> PreflightFinding:
        message, fix = self.found(*row[1:])
        return PreflightFinding(self.kind, row[0], self.severity, message, self.why, fix, self.side)


# Whether $1 is a table of an extension or of a superuser. Every role with CREATE on the database can make a view or
# table of that name, whose functions and casts would run with the rights of the preflight.
IS_OF_AN_EXTENSION = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_roles r ON r.oid = c.relowner
                WHERE c.oid = pg_catalog.to_regclass($1) AND c.relkind = 'r' AND (r.rolsuper OR EXISTS (
                      SELECT FROM pg_catalog.pg_depend d JOIN pg_catalog.pg_extension e ON e.oid = d.refobjid
                       WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = c.oid
                         AND d.refclassid = 'pg_catalog.pg_extension'::pg_catalog.regclass AND d.deptype = 'e'
                         AND e.extname IN ('pg_cron', 'pgagent'))))
"""

SOURCE, TARGET = FixedOn.SOURCE, FixedOn.TARGET
ERROR, WARNING, INFORMATION = Severity.ERROR, Severity.WARNING, Severity.INFORMATION

# Relations of users. Objects of extensions belong to the extension, which is created on the target.
_RELATIONS = f"""
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast', '{OWN_SCHEMA}')
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend x WHERE x.classid = 'pg_catalog.pg_class'::pg_catalog.regclass
                      AND x.objid = c.oid AND x.deptype = 'e')
"""
# Tables of extensions that are not empty.
_OF_EXTENSIONS = """
  FROM pg_catalog.pg_extension e JOIN pg_catalog.pg_depend x ON x.refobjid = e.oid AND x.deptype = 'e'
   AND x.refclassid = 'pg_catalog.pg_extension'::pg_catalog.regclass
   AND x.classid = 'pg_catalog.pg_class'::pg_catalog.regclass
  JOIN pg_catalog.pg_class c ON c.oid = x.objid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'r' AND c.relpersistence = 'p' AND pg_catalog.pg_relation_size(c.oid) > 0
"""
_NAMES = "SELECT n.nspname || '.' || c.relname, n.nspname::text, c.relname::text"


PUBLICATION_EXISTS = "SELECT EXISTS (SELECT FROM pg_catalog.pg_publication p WHERE p.pubname = $1::text)"
# Tables that no publication of the move has, neither by themselves nor by a partitioned table above them.
UNPUBLISHED = """
SELECT n.nspname::text AS schema, c.relname::text AS name
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'r' AND c.relpersistence = 'p' AND c.oid >= 16384 AND n.nspname <> 'subscriber'
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_publication_tables p
                     JOIN pg_catalog.pg_namespace pn ON pn.nspname = p.schemaname
                     JOIN pg_catalog.pg_class pc ON pc.relnamespace = pn.oid AND pc.relname = p.tablename
                    WHERE p.pubname = ANY ($1::text[])
                      AND pc.oid IN (SELECT c.oid UNION SELECT a FROM pg_catalog.pg_partition_ancestors(c.oid) a))
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend x WHERE x.classid = 'pg_catalog.pg_class'::pg_catalog.regclass
                      AND x.objid = c.oid AND x.deptype = 'e') ORDER BY 1, 2
"""


def _rights(side: FixedOn) -> tuple[ServerRule, ...]:
    """Return the rules about rights of the role of the move, which serve the fence of a server."""
    return (
        ServerRule(
            "database",
            side,
            ERROR,
            "A fence revokes CONNECT on the database, and its owner alone can do that",
            "SELECT d.datname::text, d.datname::text, pg_catalog.pg_get_userbyid(d.datdba)::text, current_user::text"
            " FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database()"
            " AND NOT pg_catalog.pg_has_role(d.datdba, 'USAGE')",
            lambda name, owner, role: Found(
                f'role "{role}" is neither the owner of the database nor a member of role "{owner}"',
                f"GRANT {sql_identifier(owner)} TO {sql_identifier(role)};"
                f" -- or ALTER DATABASE {sql_identifier(name)} OWNER TO {sql_identifier(role)}",
            ),
        ),
        ServerRule(
            "sessions",
            side,
            ERROR,
            "A fence ends the sessions of applications, and the move is undone if it cannot",
            f"SELECT '{side}', current_user::text, pg_catalog.array_agg(r.rolname::text ORDER BY r.rolname)"
            " FROM pg_catalog.pg_roles r WHERE r.rolcanlogin AND NOT r.rolsuper"
            " AND pg_catalog.has_database_privilege(r.oid, pg_catalog.current_database(), 'CONNECT')"
            " AND NOT pg_catalog.pg_has_role(r.oid, 'USAGE')"
            " AND NOT pg_catalog.pg_has_role('pg_signal_backend', 'USAGE')"
            " HAVING count(*) > 0",
            lambda role, others: Found(
                f'role "{role}" may not end sessions of {_few(others)}',
                f"GRANT pg_signal_backend TO {sql_identifier(role)};"
                f" -- or GRANT {', '.join(map(sql_identifier, others))} TO {sql_identifier(role)}",
            ),
        ),
    )


def _few(roles: Sequence[str]) -> str:
    shown = ", ".join(map(sql_identifier, roles[:5]))
    left = f", and {count(len(roles) - 5, 'other role')}" if len(roles) > 5 else ""
    return f"role{'s' if len(roles) > 1 else ''} {shown}{left}"


def _own_schema(side: FixedOn) -> tuple[ServerRule, ...]:
    """Return the rule about relations of applications in the program's own schema."""
    return (
        ServerRule(
            "own_schema_table",
            side,
            ERROR,
            "A move leaves the program's own schema behind, with this relation",
            "SELECT n.nspname || '.' || c.relname, n.nspname::text, c.relname::text,"
            " CASE c.relkind WHEN 'v' THEN 'VIEW' WHEN 'm' THEN 'MATERIALIZED VIEW' WHEN 'S' THEN 'SEQUENCE'"
            " WHEN 'f' THEN 'FOREIGN TABLE' ELSE 'TABLE' END"
            " FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
            f" WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f', 'S') AND {IS_OURS} AND NOT {IS_OWN_NAME}"
            " AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend d WHERE d.objid = c.oid"
            " AND d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.deptype IN ('a', 'i')"
            " AND d.refclassid = d.classid)",
            lambda schema, name, kind: Found(
                "it is in the schema of subscriber, and not its own",
                f"ALTER {kind} {sql_name(schema, name)} SET SCHEMA public;",
            ),
        ),
    )


SOURCE_RULES = (
    *_rights(SOURCE),
    *_own_schema(SOURCE),
    ServerRule(
        "table_owner",
        SOURCE,
        ERROR,
        "Only the owner can publish a table, and add the trigger of the fence",
        "SELECT r.rolname::text, r.rolname::text, current_user::text, pg_catalog.count(*)"
        f" {_RELATIONS.replace('WHERE', 'JOIN pg_catalog.pg_roles r ON r.oid = c.relowner WHERE', 1)}"
        " AND c.relkind IN ('r', 'p') AND c.relpersistence = 'p'"
        " AND NOT pg_catalog.pg_has_role(c.relowner, 'USAGE') GROUP BY r.rolname",
        lambda owner, role, number: Found(
            f'role "{role}" is no member of the owner of {count(number, "table")}',
            f"GRANT {sql_identifier(owner)} TO {sql_identifier(role)};",
        ),
    ),
    ServerRule(
        "identity",
        SOURCE,
        ERROR,
        "UPDATE and DELETE fail on it as soon as it is published",
        f"{_NAMES}, c.relreplident::text {_RELATIONS} AND c.relkind = 'r' AND c.relpersistence = 'p'"
        """ AND c.relreplident <> 'f' AND NOT EXISTS (SELECT FROM pg_catalog.pg_index i WHERE i.indrelid = c.oid
             AND i.indisvalid AND i.indimmediate
             AND CASE c.relreplident WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident ELSE false END)""",
        lambda schema, name, kind: Found(
            "the table has no primary key" if kind == "d" else "the table has no replica identity",
            f"ALTER TABLE {sql_name(schema, name)} REPLICA IDENTITY FULL;",
        ),
    ),
    ServerRule(
        "unlogged",
        SOURCE,
        ERROR,
        "Logical replication does not publish its rows, so they stay behind",
        f"{_NAMES}, c.relkind::text {_RELATIONS} AND c.relpersistence = 'u' AND c.relkind IN ('r', 'p', 'S')"
        " AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend d WHERE d.objid = c.oid AND c.relkind = 'S'"
        " AND d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.deptype IN ('a', 'i'))",
        lambda schema, name, kind: Found(
            "the sequence is UNLOGGED" if kind == "S" else "the table is UNLOGGED",
            f"ALTER {'SEQUENCE' if kind == 'S' else 'TABLE'} {sql_name(schema, name)} SET LOGGED;",
        ),
    ),
    ServerRule(
        "temporary",
        SOURCE,
        INFORMATION,
        "It ends with its session, and applications create it again on the target",
        f"SELECT n.nspname || '.' || c.relname {_RELATIONS} AND c.relpersistence = 't' AND c.relkind IN ('r', 'p')",
        lambda: Found("the table is temporary"),
    ),
    ServerRule(
        "foreign_table",
        SOURCE,
        WARNING,
        "Its definition is copied. The target needs a network path to the foreign server, and the user mappings",
        f"SELECT n.nspname || '.' || c.relname, n.nspname::text, c.relname::text, (SELECT s.srvname::text"
        " FROM pg_catalog.pg_foreign_table f JOIN pg_catalog.pg_foreign_server s ON s.oid = f.ftserver"
        f" WHERE f.ftrelid = c.oid) {_RELATIONS} AND c.relkind = 'f'",
        lambda schema, name, server: Found(
            f'the rows of the foreign table are on foreign server "{server}"',
            f"SELECT FROM {sql_name(schema, name)} LIMIT 0; -- on the target, after its definition is copied",
        ),
    ),
    ServerRule(
        "user_mapping",
        SOURCE,
        WARNING,
        "The mapping is copied without options, so the foreign server refuses its user",
        "SELECT m.srvname || '.' || m.usename, m.srvname::text, m.usename::text FROM pg_catalog.pg_user_mappings m"
        " WHERE m.umoptions IS NULL AND NOT (SELECT rolsuper FROM pg_catalog.pg_roles"
        " WHERE rolname = current_user)",
        lambda server, user: Found(
            "its options cannot be read",
            f"ALTER USER MAPPING FOR {'PUBLIC' if user == 'public' else sql_identifier(user)} SERVER"
            f" {sql_identifier(server)} OPTIONS (ADD password '…'); -- on the target",
        ),
    ),
    ServerRule(
        "prepared_transaction",
        SOURCE,
        ERROR,
        "It keeps the slot from being created, and COMMIT PREPARED on the source after the switch is lost",
        "SELECT p.gid::text, p.gid::text, p.owner::text, p.prepared::text FROM pg_catalog.pg_prepared_xacts p"
        " WHERE p.database = pg_catalog.current_database()",
        lambda gid, owner, prepared: Found(
            f'role "{owner}" has prepared the transaction at {prepared}',
            f"ROLLBACK PREPARED {sql_literal(gid)}; -- or COMMIT PREPARED",
        ),
    ),
    ServerRule(
        "slot",
        SOURCE,
        WARNING,
        "Its consumer does not receive the changes that are made on the target",
        "SELECT s.slot_name::text, s.slot_name::text, s.plugin::text, s.active FROM pg_catalog.pg_replication_slots s"
        " WHERE s.database = pg_catalog.current_database() AND NOT s.temporary"
        " AND NOT (s.slot_name::text = ANY ($1::text[]))",
        lambda name, plugin, active: Found(
            f"a consumer {'reads' if active else 'has'} a logical slot of {plugin}",
            f"SELECT pg_drop_replication_slot({sql_literal(name)}); -- after its consumer has moved",
        ),
    ),
    ServerRule(
        "job",
        SOURCE,
        WARNING,
        "The job is not copied, and it fails on the source after the switch",
        "SELECT 'pg_cron.' || jobid, jobid::bigint, schedule::text, command::text FROM cron.job"
        " WHERE database = pg_catalog.current_database() AND active",
        lambda number, schedule, command: Found(
            f"pg_cron runs it at {schedule}",
            f"SELECT cron.unschedule({number}); -- then on the target: SELECT cron.schedule({sql_literal(schedule)},"
            f" {sql_literal(command)});",
        ),
        needs="cron.job",
    ),
    ServerRule(
        "job",
        SOURCE,
        WARNING,
        "The job is not copied, and it fails on the source after the switch",
        "SELECT 'pgagent.' || jobname, jobid::bigint FROM pgagent.pga_job WHERE jobenabled",
        lambda number: Found(
            "pgAgent runs it", f"UPDATE pgagent.pga_job SET jobenabled = false WHERE jobid = {number};"
        ),
        needs="pgagent.pga_job",
    ),
    ServerRule(
        "read_only",
        SOURCE,
        WARNING,
        "The setting precedes the one of the database, with which a move asks applications not to write",
        "SELECT pg_catalog.pg_get_userbyid(s.setrole)::text, pg_catalog.pg_get_userbyid(s.setrole)::text,"
        " s.setdatabase <> 0, pg_catalog.current_database()::text FROM pg_catalog.pg_db_role_setting s"
        " WHERE s.setrole <> 0 AND s.setdatabase IN (0, (SELECT oid FROM pg_catalog.pg_database"
        " WHERE datname = pg_catalog.current_database()))"
        " AND s.setconfig::text ~ '[{,\"]default_transaction_read_only='",
        lambda role, in_database, database: Found(
            "the role overrides default_transaction_read_only",
            f"ALTER ROLE {sql_identifier(role)}{f' IN DATABASE {sql_identifier(database)}' if in_database else ''}"
            " RESET default_transaction_read_only;",
        ),
    ),
    ServerRule(
        "sequence",
        SOURCE,
        ERROR,
        "Its value cannot be copied, so the target gives values again that the source has given",
        f"{_NAMES}, current_user::text {_RELATIONS} AND c.relkind = 'S' AND c.relpersistence <> 't'"
        " AND NOT (pg_catalog.has_sequence_privilege(c.oid, 'SELECT')"
        " AND pg_catalog.has_schema_privilege(n.oid, 'USAGE'))",
        lambda schema, name, role: Found(
            f'role "{role}" may not read the sequence',
            f"GRANT USAGE ON SCHEMA {sql_identifier(schema)} TO {sql_identifier(role)};"
            f" GRANT SELECT ON SEQUENCE {sql_name(schema, name)} TO {sql_identifier(role)};",
        ),
    ),
    ServerRule(
        "table",
        SOURCE,
        ERROR,
        "Neither pg_dump nor the initial copy can read it",
        f"{_NAMES}, current_user::text {_RELATIONS} AND c.relkind IN ('r', 'p', 'm', 'v') AND c.relpersistence <> 't'"
        " AND NOT (pg_catalog.has_table_privilege(c.oid, 'SELECT')"
        " AND pg_catalog.has_schema_privilege(n.oid, 'USAGE'))",
        lambda schema, name, role: Found(
            f'role "{role}" may not read the table',
            f"GRANT USAGE ON SCHEMA {sql_identifier(schema)} TO {sql_identifier(role)};"
            f" GRANT SELECT ON TABLE {sql_name(schema, name)} TO {sql_identifier(role)};",
        ),
    ),
    ServerRule(
        "row_security",
        SOURCE,
        ERROR,
        "The initial copy ends with an error, because it would not see all rows",
        f"SELECT n.nspname || '.' || c.relname, current_user::text {_RELATIONS} AND c.relkind IN ('r', 'p')"
        " AND pg_catalog.row_security_active(c.oid)",
        lambda role: Found(f'row security applies to role "{role}"', f"ALTER ROLE {sql_identifier(role)} BYPASSRLS;"),
    ),
    ServerRule(
        "forced_row_security",
        SOURCE,
        ERROR,
        "Changes are applied as the owner of the table, to whom the policies apply on the target as well",
        f"{_NAMES} {_RELATIONS} AND c.relkind IN ('r', 'p') AND c.relrowsecurity AND c.relforcerowsecurity"
        " AND NOT EXISTS (SELECT FROM pg_catalog.pg_roles r"
        " WHERE r.oid = c.relowner AND (r.rolsuper OR r.rolbypassrls))",
        lambda schema, name: Found(
            "row security is forced upon the owner of the table",
            f"ALTER TABLE {sql_name(schema, name)} NO FORCE ROW LEVEL SECURITY;",
        ),
    ),
    ServerRule(
        "long_transaction",
        SOURCE,
        WARNING,
        "The slot of the subscription, and of each table that is copied, waits for its end",
        "SELECT a.pid::text, a.pid, a.usename::text,"
        " pg_catalog.date_trunc('second', pg_catalog.now() - a.xact_start)::text"
        " FROM pg_catalog.pg_stat_activity a WHERE a.backend_xid IS NOT NULL AND a.pid <> pg_catalog.pg_backend_pid()"
        " AND a.xact_start < pg_catalog.now() - interval '1 minute'",
        lambda pid, role, age: Found(
            f'role "{role}" has an open transaction with changes since {age}', f"SELECT pg_terminate_backend({pid});"
        ),
    ),
    ServerRule(
        "materialized_view",
        SOURCE,
        INFORMATION,
        "It stays so on the target, and queries of it fail on both sides",
        f"{_NAMES} {_RELATIONS} AND c.relkind = 'm' AND NOT c.relispopulated",
        lambda schema, name: Found(
            "the materialized view has no data", f"REFRESH MATERIALIZED VIEW {sql_name(schema, name)};"
        ),
    ),
    ServerRule(
        "replica_trigger",
        SOURCE,
        WARNING,
        "It fires on the target when replicated changes are applied, in addition to the source",
        "SELECT n.nspname || '.' || c.relname || '.' || t.tgname, n.nspname::text, c.relname::text, t.tgname::text,"
        " t.tgenabled::text, 'TRIGGER'"
        f"{_RELATIONS.replace('WHERE', 'JOIN pg_catalog.pg_trigger t ON t.tgrelid = c.oid WHERE', 1)}"
        " AND NOT t.tgisinternal AND t.tgenabled IN ('A', 'R')"
        " AND NOT EXISTS (SELECT FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace f ON f.oid = p.pronamespace"
        f" WHERE p.oid = t.tgfoid AND f.nspname = '{OWN_SCHEMA}')"
        " UNION ALL SELECT n.nspname || '.' || c.relname || '.' || w.rulename, n.nspname::text, c.relname::text,"
        " w.rulename::text, w.ev_enabled::text, 'RULE'"
        f"{_RELATIONS.replace('WHERE', 'JOIN pg_catalog.pg_rewrite w ON w.ev_class = c.oid WHERE', 1)}"
        " AND w.ev_enabled IN ('A', 'R')",
        lambda schema, table, name, enabled, what: Found(
            f"the {what.lower()} is ENABLE {'ALWAYS' if enabled == 'A' else 'REPLICA'}",
            f"ALTER TABLE {sql_name(schema, table)} ENABLE {what} {sql_identifier(name)};",
        ),
    ),
    ServerRule(
        "superuser",
        SOURCE,
        WARNING,
        "The fence does not keep superusers out, so its writes during the switch can be lost",
        "SELECT r.rolname::text, r.rolname::text, EXISTS (SELECT FROM pg_catalog.pg_stat_activity a"
        " WHERE a.usesysid = r.oid AND a.datname = pg_catalog.current_database())"
        " FROM pg_catalog.pg_roles r WHERE r.rolsuper AND r.rolcanlogin AND r.oid <> 10 AND r.rolname <> current_user"
        "",
        lambda role, connected: Found(
            f"the role is a superuser{', and is connected' if connected else ''}",
            f"ALTER ROLE {sql_identifier(role)} NOSUPERUSER;",
        ),
    ),
    ServerRule(
        "extension_rows",
        SOURCE,
        INFORMATION,
        "The target creates the extension with rows of its own. They become the source's, as far as a key has another"
        " row. Rows that only the target has stay, for example those of a newer version",
        f"SELECT n.nspname || '.' || c.relname, e.extname::text {_OF_EXTENSIONS}"
        " AND pg_catalog.pg_has_role(c.relowner, 'USAGE')",
        lambda extension: Found(f"the table of extension {sql_identifier(extension)} has rows"),
    ),
    ServerRule(
        "extension_rows",
        SOURCE,
        WARNING,
        "Only the owner of a table can publish it, so its rows stay behind",
        f"SELECT n.nspname || '.' || c.relname, e.extname::text, n.nspname::text, c.relname::text {_OF_EXTENSIONS}"
        " AND NOT pg_catalog.pg_has_role(c.relowner, 'USAGE') AND c.oid = ANY (e.extconfig)",
        lambda extension, schema, name: Found(
            f"the table of extension {sql_identifier(extension)} has rows, and belongs to another role",
            f"ALTER TABLE {sql_name(schema, name)} OWNER TO CURRENT_USER; -- or copy rows of your own by hand",
        ),
    ),
    ServerRule(
        "wal_keep",
        SOURCE,
        WARNING,
        "The slot is lost, and the copy starts again, if more WAL is written before the target has received it",
        "SELECT s.name, s.name, s.setting, s.unit, pg_catalog.pg_database_size(pg_catalog.current_database())"
        " FROM pg_catalog.pg_settings s WHERE (s.name = 'max_slot_wal_keep_size' AND s.setting <> '-1'"
        " OR s.name = 'idle_replication_slot_timeout' AND s.setting <> '0')",
        lambda name, value, unit, size: Found(
            f"{name} is {value} {unit}; a database of {in_bytes(size)} is copied, for about"
            f" {max(1, size // COPY_RATE // 60)} minutes at {COPY_RATE // 2**20} MiB/s",
            f"ALTER SYSTEM SET {name} = {'-1' if name.startswith('max') else '0'}; SELECT pg_reload_conf();",
        ),
    ),
    ServerRule(
        "disk",
        SOURCE,
        INFORMATION,
        "The target needs this space, and as much again as its largest indexes while they are built. The source keeps"
        " the WAL that is written during the copy",
        "SELECT 'database', pg_catalog.pg_database_size(pg_catalog.current_database()),"
        " coalesce((SELECT max(pg_catalog.pg_relation_size(indexrelid)) FROM pg_catalog.pg_index), 0)"
        "",
        lambda size, largest: Found(
            f"the database has {in_bytes(size)}, its largest index {in_bytes(largest)}; no server tells its free space"
        ),
    ),
)

TARGET_RULES = (
    *_rights(TARGET),
    *_own_schema(TARGET),
    ServerRule(
        "event_trigger",
        TARGET,
        WARNING,
        "It fires while definitions are copied",
        "SELECT e.evtname::text, e.evtname::text FROM pg_catalog.pg_event_trigger e JOIN pg_catalog.pg_proc p"
        " ON p.oid = e.evtfoid JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace"
        f" WHERE e.evtenabled IN ('O', 'A') AND n.nspname <> '{OWN_SCHEMA}'",
        lambda name: Found("the event trigger is enabled", f"ALTER EVENT TRIGGER {sql_identifier(name)} DISABLE;"),
    ),
)

COPY_RATE = 20 * 2**20  # bytes a second, for an estimate of the copy on an ordinary network
