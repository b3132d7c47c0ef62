"""TargetSession: a session on the target, with its role, the tables that it knows, and its open transaction.

Purpose. It does what every statement on a table of the target needs: act as the right role, keep code of other roles
away, and find out if a table was altered. targets/postgres/row_applier.py applies changes with it. A copy or a
comparison of tables uses it without an applier.

Invariants.

- A session is complete when it is made. Nothing sets its attributes later.
- The shape of a table is checked in each transaction that writes it (schema_check.py).
- Statements that do not belong to a table run as the session's own role (roles.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Final

from subscriber.apply.conflicts.delta import delta_types
from subscriber.apply.conflicts.rules import NO_RULES, ConflictRules
from subscriber.apply.relation_map import LocalRelation, RelationMapping, map_relation
from subscriber.connection.pipeline import Pipeline
from subscriber.errors import MappingError, StaleMapping, SubscriberError
from subscriber.protocol.messages import Relation
from subscriber.server_version import Wording
from subscriber.sqlstate import TARGET_TABLE_CHANGED
from subscriber.subscription import Subscription
from subscriber.targets.postgres.session import introspection, schema_check
from subscriber.targets.postgres.session.capabilities import TargetCapabilities, apply_settings
from subscriber.targets.postgres.session.error_context import explain
from subscriber.targets.postgres.session.foreign_code import ForeignCodeGuard
from subscriber.targets.postgres.session.known_tables import KnownTables
from subscriber.targets.postgres.session.roles import RoleSwitcher, load_roles
from subscriber.targets.postgres.session.statement_context import StatementContext

_ALL = TargetCapabilities()


class TargetSession:
    """One session on the target. Two tasks must not use it concurrently.

    Attributes:
        pipeline: sends the statements. Nothing else uses its session.
        roles: switches between the roles of the session.
        capabilities: what the session's own role can do.
        origin: the name of the replication origin, for the CONTEXT of errors.
        wording: of the server, for messages in its words.
        known_tables: definitions that sessions of the subscription have read.
        rules: the conflict options of the subscription.
        foreign_code: protects the session against code of other roles.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        roles: RoleSwitcher,
        *,
        capabilities: TargetCapabilities = _ALL,
        settings: tuple[str, ...] = (),
        origin: str = "",
        known_tables: KnownTables | None = None,
        rules: ConflictRules = NO_RULES,
    ) -> None:
        """Create a session of a connection.

        Args:
            pipeline: the connection.
            roles: the roles of the same connection.
            capabilities: what its role can do.
            settings: the statements that have configured it. They are repeated after foreign code has run.
            origin: see the attribute.
            known_tables: see the attribute. None: the session shares no definitions.
            rules: see the attribute.
        """
        self.pipeline: Final = pipeline
        self.roles: Final = roles
        self.capabilities: Final = capabilities
        self.origin: Final = origin
        self.wording: Final = Wording.of(pipeline.session.server_version // 10_000)
        self.known_tables: Final = KnownTables() if known_tables is None else known_tables
        self.rules: Final = rules
        self._schema = schema_check.SchemaChecker(pipeline)
        self.foreign_code: Final = ForeignCodeGuard(pipeline, roles, self._schema, settings)
        # The state of the open transaction.
        self._is_open = False  # it has begun, and its end was not queued
        self._checked: set[int] = set()  # OIDs of tables whose shape it has checked
        self._mapped: frozenset[int] = frozenset()  # OIDs of tables that were mapped since the last one ended

    # --- tables ---------------------------------------------------------------------------------

    async def map_relation(self, remote: Relation) -> RelationMapping:
        """Map a published table to the table of that name.

        Raises:
            MappingError: there is no such table, or its columns do not fit.
        """
        known = self.known_tables.find(remote.schema, remote.name, self.roles.terms)
        if known is not None:
            with suppress(MappingError):  # it may have been altered since
                return self._mapping(remote, known)
        local = await self._introspect(remote)
        self._mapped |= {local.oid}
        self.known_tables.add(local, self.roles.terms)
        return self._mapping(remote, local)

    async def check_unsearchable(self, mapping: RelationMapping) -> None:
        """Check that a table still has no index that identifies its rows.

        Raises:
            StaleMapping: it has one by now.
        """
        if self._mapping(mapping.remote, await self._introspect(mapping.remote)).unsearchable is None:
            self.known_tables.forget()
            raise StaleMapping("the target table has changed its shape", sqlstate=TARGET_TABLE_CHANGED)

    async def _introspect(self, remote: Relation) -> LocalRelation:
        self.roles.reset_role(StatementContext("RELATION"))
        return await introspection.introspect(self.pipeline, remote.schema, remote.name, self.roles.terms)

    def _mapping(self, remote: Relation, local: LocalRelation) -> RelationMapping:
        # Each change of a table that a policy concerns reads the target first.
        if local.batch_exclusion is None and self.rules.concern_table(local):
            local = replace(local, batch_exclusion="conflict policy")
        mapping = map_relation(remote, local, self.pipeline.codec)
        mapping.delta_types = delta_types(mapping, self.rules.policies.delta_columns((local.schema, local.name)))
        return mapping

    async def check_some_shapes(self) -> bool:
        """Compare the shapes of some known tables if the session has nothing to do. Returns True if there were any."""
        note = StatementContext("RELATION")
        if not self.pipeline.idle or self._is_open or not self._schema.check_some(self.roles.owner, note):
            return False
        await self.pipeline.sync()
        return True

    def check_ahead(self, tables: Iterable[LocalRelation]) -> None:
        """Have check_some_shapes() compare these tables, so that their first changes need not."""
        self._schema.check_later(tables)

    # --- the open transaction -------------------------------------------------------------------

    @property
    def mapped(self) -> frozenset[int]:
        """OIDs of tables that were mapped since the last transaction ended. Their shapes are new."""
        return self._mapped

    def begin(self, note: object) -> None:
        """Queue BEGIN."""
        self._is_open = True
        self._checked.clear()
        self.roles.on_begin()
        self.foreign_code.began()
        self.pipeline.execute("BEGIN", note=note)

    def ended(self) -> None:
        """The end of the transaction was queued."""
        self._is_open = False
        self.foreign_code.clean()
        self._mapped = frozenset()

    def rolled_back(self) -> None:
        """The transaction was rolled back because of an error. Its changes are applied again."""
        self._is_open = False

    def rolled_back_to_savepoint(self) -> None:
        """The role and the locks that keep the shapes of tables went back with the savepoint."""
        self.roles.on_begin()
        self._checked.clear()
        self._schema.forget()

    def restore_mapped(self, mapped: frozenset[int]) -> None:
        """The transaction is applied again, with tables that were mapped before its first attempt."""
        self._mapped = mapped

    def is_unchecked(self, oids: Collection[int]) -> bool:
        """Return True if the shape of a table may be that of an earlier transaction."""
        return any(oid not in self._checked and oid not in self._mapped for oid in oids)

    def prepare_to_write(self, tables: Sequence[RelationMapping], mode: str, note: object) -> None:
        """Queue what precedes a statement that writes tables: a guard if they need one, and the role.

        Args:
            tables: the tables of the statement.
            mode: the lock that the statement takes, as in LOCK TABLE.
            note: the context of errors.

        Raises:
            MappingError: the subscription's owner may not act as the owner of a table.
        """
        for mapping in tables:
            local = mapping.local
            if local.guarded and local.oid not in self._checked:
                self._checked.add(local.oid)
                self.foreign_code.guard(local, mode, note)
        self.roles.switch_for_tables([mapping.local for mapping in tables], note)
        for mapping in tables:
            if mapping.runs_foreign_code:
                self.foreign_code.begin(mapping)

    def finish_writing(self, tables: Sequence[RelationMapping], note: object) -> None:
        """Queue what follows the statement: the session's state after foreign code, and the check of each shape."""
        if any(mapping.runs_foreign_code for mapping in tables):
            self.foreign_code.set_again(note)
        for mapping in tables:
            local = mapping.local
            if local.oid not in self._checked:
                self._checked.add(local.oid)
                self.roles.reset_role(note)
                self._schema.check(local, self.roles.owner, note)

    @contextmanager
    def asking(self, mapping: RelationMapping, note: object, *, as_owner: bool = True) -> Iterator[None]:
        """Within the block a question about rows of the table is queued, inside of a transaction or between two.

        `as_owner`: as the role that applies the table's changes; otherwise the question does not read the table.
        """
        guarded, alone = mapping.local.guarded and as_owner, not self._is_open
        if alone:
            self.pipeline.execute("BEGIN", note=note)
        role = self.roles.reset_role(note)
        if guarded and (alone or mapping.local.oid not in self._checked):
            self.foreign_code.guard(mapping.local, "ACCESS SHARE", note)
        if as_owner:
            self.roles.switch_for_tables([mapping.local], note)
        yield
        if alone:
            self.pipeline.execute("COMMIT", note=note)
            self.roles.on_begin()
        else:
            self.roles.restore_role(role, note)

    # --- errors ---------------------------------------------------------------------------------

    def explain(self, error: SubscriberError) -> SubscriberError:
        """Return an error of this session's statements with its CONTEXT (error_context.py). Others stay as they are."""
        if error is not self.pipeline.error:
            return error
        explained = explain(error, self.pipeline, self.roles, self.origin, self.wording)
        if isinstance(explained, StaleMapping):
            self.known_tables.forget()
        return explained


async def configure_session(
    pipeline: Pipeline,
    subscription: Subscription,
    capabilities: TargetCapabilities,
    *,
    synchronous_commit: str | None = None,
    origin: str = "",
    known_tables: KnownTables | None = None,
    rules: ConflictRules = NO_RULES,
    code_changes_session: bool = False,
) -> TargetSession:
    """Give a connection the settings and roles of an apply worker's session.

    Args:
        pipeline: the connection.
        subscription: the subscription.
        capabilities: see TargetSession.
        synchronous_commit: the setting. None: that of the subscription.
        origin: see TargetSession.
        known_tables: see TargetSession.
        rules: see TargetSession.
        code_changes_session: set the session's state again after the code of tables (foreign_code.py).

    Raises:
        ServerError: the role may not set a setting.
    """
    roles = await load_roles(
        pipeline, subscription, replica_role=capabilities.replica_role, code_changes_session=code_changes_session
    )
    settings = apply_settings(pipeline.session, capabilities, synchronous_commit or subscription.synchronous_commit)
    for statement in settings:
        pipeline.execute(statement, note=StatementContext("SET"))
    await pipeline.sync()
    return TargetSession(
        pipeline,
        roles,
        capabilities=capabilities,
        settings=settings,
        origin=origin,
        known_tables=known_tables,
        rules=rules,
    )
