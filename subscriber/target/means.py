"""What the role of an apply session may use on the target, and what is different where it may not.

PostgreSQL's own worker is part of the server and may do everything. A role of a managed service often may not, and
most things work all the same; what does not is said once in the log, and in `subscriber status`.
"""

from __future__ import annotations

from dataclasses import dataclass

from subscriber.apply.relation_map import LocalRelation
from subscriber.connection.pipeline import Pipeline
from subscriber.connection.session import Session
from subscriber.errors import MappingError, ServerError

INSUFFICIENT_PRIVILEGE = "42501"

WITHOUT_REPLICA_ROLE = (
    "session_replication_role cannot be set: ordinary triggers and rules of the tables run for replicated changes, and "
    "foreign keys are checked and cascade"
)
WITHOUT_ORIGINS = (
    "replication origins cannot be used: progress is in subscriber.progress alone, and replicated changes look like "
    "local ones: a subscription to this database with origin = none gets them, too"
)

# By name, as the arguments of some depend on the version. Creating them is done by a function of schema subscriber,
# with its owner's rights.
_ORIGINS = """
SELECT pg_catalog.bool_and(pg_catalog.has_function_privilege(p.oid, 'EXECUTE'))
   AND (SELECT r.rolsuper FROM pg_catalog.pg_proc c JOIN pg_catalog.pg_roles r ON r.oid = c.proowner
         WHERE c.oid = 'subscriber.create_origin(pg_catalog.text)'::pg_catalog.regprocedure)
  FROM pg_catalog.pg_proc p
 WHERE p.pronamespace = 'pg_catalog'::pg_catalog.regnamespace
   AND p.proname IN ('pg_replication_origin_progress', 'pg_replication_origin_advance',
                     'pg_replication_origin_session_setup', 'pg_replication_origin_session_reset',
                     'pg_replication_origin_xact_setup')
"""

# The tables of schema subscriber have policies, which hold for everybody but a superuser and their owner.
_OWN_TABLES = """
SELECT r.rolsuper OR r.rolbypassrls OR pg_catalog.pg_has_role(n.nspowner, 'USAGE')
  FROM pg_catalog.pg_roles r, pg_catalog.pg_namespace n WHERE r.rolname = current_user AND n.nspname = 'subscriber'
"""
_ROW_SECURITY = """
SELECT r.rolname FROM pg_catalog.pg_class c, pg_catalog.pg_roles r
 WHERE c.relrowsecurity AND NOT (r.rolsuper OR r.rolbypassrls)
   AND (c.relforcerowsecurity OR NOT pg_catalog.pg_has_role(r.oid, c.relowner, 'USAGE'))
   AND c.oid = $1::pg_catalog.text::pg_catalog.oid
   AND r.rolname = CASE $2::pg_catalog.text WHEN 'none' THEN session_user ELSE $2::pg_catalog.text::pg_catalog.name END
"""


@dataclass(frozen=True, slots=True)
class Means:
    replica_role: bool = True  # session_replication_role = replica
    origins: bool = True
    own_tables: bool = True  # those of schema subscriber, without policies: row_security may be off

    @property
    def limits(self) -> tuple[str, ...]:
        """What has to be known about what is missing."""
        found = ((self.replica_role, WITHOUT_REPLICA_ROLE), (self.origins, WITHOUT_ORIGINS))
        return tuple(text for has, text in found if not has)


async def find_means(session: Session) -> Means:
    """What the session's role may use; session_replication_role is set, if it may be."""
    replica_role = True
    try:  # asking would not do: a managed service may permit more than the privileges say
        await session.query("SET session_replication_role = replica")
    except ServerError as error:
        if error.sqlstate != INSUFFICIENT_PRIVILEGE:
            raise
        replica_role = False
    ((origins, own_tables),) = await session.rows(f"SELECT ({_ORIGINS}), ({_OWN_TABLES})")
    return Means(replica_role, origins == "t", own_tables == "t")


async def refuse_row_security(pipeline: Pipeline, local: LocalRelation, role: str) -> None:
    """What row_security = off does where it may not be off: raise MappingError instead of leaving rows out.

    `role` is who changes the table, or "none" for the session's own.
    """
    for (name,) in await pipeline.rows(_ROW_SECURITY, str(local.oid), role):
        raise MappingError(
            f'user "{name}" cannot replicate into relation with row-level security enabled: "{local.name}"',
            sqlstate="0A000",
        )
