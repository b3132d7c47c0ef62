"""The role that applies changes: the table's owner, or the subscription's (run_as_owner).

The session's own role is the launcher's, most often a superuser. Code that belongs to a table (triggers, defaults,
constraints, index expressions) must not run with these rights: otherwise the owner of a table would have them. So each
change runs as the owner of its table, if the subscription's owner may SET ROLE to it, or as the subscription's owner if
the subscription says so. The server then checks privileges and row-level security for that role. Our own statements,
for progress and the check of a table's shape, run as the session's own role.

A role may lack USAGE on the schema of its own table, or of a type. The built-in worker finds both by their OIDs. Here
the session's own role then parses the statement, and the other role executes it. It is parsed for each use: if the
server parsed it again by itself, after ANALYZE for one, it would do so as the wrong role.

PostgreSQL marks the switch as a security-restricted operation, in which the role cannot be set back. SQL cannot do
that: code that the change runs can set the role to "none", and then has the rights of the session's own role. So
the role serves the server's privilege checks, and is no protection. The protection is that code of roles which the
session must not trust runs only where the session's role has no more rights than they have (foreign_code.py).

Source: SwitchToUntrustedUser() in usercontext.c, TargetPrivilegesCheck() in worker.c.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from subscriber.apply.relation_map import LocalRelation
from subscriber.connection.pipeline import Pipeline
from subscriber.errors import MappingError
from subscriber.sqlstate import INSUFFICIENT_PRIVILEGE
from subscriber.subscription import Subscription
from subscriber.targets.postgres.session.introspection import Terms

_HAS_PRIVILEGE = "SELECT pg_catalog.has_table_privilege($1::pg_catalog.name, $2::pg_catalog.oid, $3)"
_SET_ROLE = "SELECT pg_catalog.set_config('role', $1, true)"


@dataclass(frozen=True, slots=True)
class Role:
    """Who acts. `knows_names`: it may use the schemas of what statements name."""

    name: str
    knows_names: bool = True


NOBODY = Role("none")  # the session's own role
_NO_SUBSCRIPTION = Terms()


class RoleSwitcher:
    """The role of a session's transaction.

    Attributes:
        terms: the subscription's owner, and the conditions on which tables are mapped. By default, changes are applied
            as the session's own role.
    """

    def __init__(self, pipeline: Pipeline, terms: Terms = _NO_SUBSCRIPTION, session_user: str = "") -> None:
        """Create a switcher for the session of `pipeline`, whose own role is `session_user`."""
        self.terms: Final = terms
        self._pipeline = pipeline
        self._session_user = session_user
        self._now: Role | None = NOBODY  # None: unknown

    @property
    def owner(self) -> str:
        """The owner of the subscription. Empty: no particular role."""
        return self.terms.owner

    def on_other_session(self, pipeline: Pipeline) -> RoleSwitcher:
        """Return the same roles for another session of the same role."""
        return RoleSwitcher(pipeline, self.terms, self._session_user)

    def on_begin(self) -> None:
        """A transaction has begun; the last one's role ended with it."""
        self._now = NOBODY
        self._pipeline.parsing = None

    def switch_for_tables(self, tables: Sequence[LocalRelation], note: object) -> None:
        """Queue the switch for a change of `tables`. Raises MappingError if it is not allowed."""
        self._switch(self.role(tables), note)

    async def name_tables(self, tables: Sequence[LocalRelation], privilege: str, note: object) -> None:
        """Prepare for a command that resolves names when it is executed. Call it after switch_for_tables().

        Where the role may not use a schema, the session's own role runs the command. Raises MappingError if the other
        role lacks the privilege.
        """
        if self._pipeline.parsing is None:
            return
        name = self.name(tables)
        self.reset_role(note)
        for table in tables:
            if await self._pipeline.rows(_HAS_PRIVILEGE, name, str(table.oid), privilege) != [("t",)]:
                raise MappingError(
                    f'permission denied for table "{table.schema}.{table.name}"',
                    detail=f'Changes are applied as role "{name}", which lacks {privilege}.',
                    sqlstate=INSUFFICIENT_PRIVILEGE,
                )

    def role(self, tables: Sequence[LocalRelation]) -> Role:
        """The role for a change of `tables`. Raises MappingError."""
        if not self.owner:
            return NOBODY
        role = self.owner
        if not self.terms.run_as_owner:
            for table in tables:
                if not table.may_set_role:
                    raise MappingError(
                        f'role "{self.owner}" cannot SET ROLE to "{table.owner}"', sqlstate=INSUFFICIENT_PRIVILEGE
                    )
            if len({table.owner for table in tables}) == 1:
                role = tables[0].owner
        if role == self._session_user:
            return NOBODY
        return Role(role, knows_names=not any(table.closed_schemas for table in tables))

    def name(self, tables: Sequence[LocalRelation]) -> str:
        """The role for a change of `tables`, by its name."""
        role = self.role(tables)
        return self._session_user if role == NOBODY else role.name

    def reset_role(self, note: object) -> Role:
        """Queue the switch to the session's own role; the role until now, for resume()."""
        before = self._now or NOBODY
        self._switch(NOBODY, note)
        return before

    def restore_role(self, role: Role, note: object) -> None:
        self._switch(role, note)

    def reset(self, note: object) -> None:
        """Queue the switch to the session's own role. The current role may be unknown."""
        self._now = None
        self._switch(NOBODY, note)

    def _switch(self, role: Role, note: object) -> None:
        if role == self._now:
            return
        self._pipeline.parsing = None
        if self._now is None or role.name != self._now.name:
            self._pipeline.execute(_SET_ROLE, parameters=self._pipeline.texts((role.name,)), note=note)
        self._now = role
        if not role.knows_names:
            self._pipeline.parsing = self._as_session

    @contextmanager
    def _as_session(self, note: object) -> Iterator[None]:
        """Within the block the session's own role resolves names. Privileges are checked at execution."""
        role = self.reset_role(note)
        yield
        self.restore_role(role, note)


async def load_roles(
    pipeline: Pipeline, subscription: Subscription, *, replica_role: bool, code_changes_session: bool = False
) -> RoleSwitcher:
    """Return the roles in which changes of a subscription are applied.

    Args:
        pipeline: the session.
        subscription: the subscription.
        replica_role: the session has session_replication_role = replica.
        code_changes_session: set the session's state again after the code of tables (foreign_code.py).
    """
    ((user,),) = await pipeline.rows("SELECT session_user")
    terms = Terms(
        subscription.owner,
        subscription.run_as_owner,
        subscription.trusted_owners,
        replica_role,
        code_changes_session,
    )
    return RoleSwitcher(pipeline, terms, user or "")
