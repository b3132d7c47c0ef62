"""Protection of a session in which code of other roles runs: triggers, defaults, domains of the target's tables.

Such code can change the session's state in every way that SQL can: role, settings, prepared statements under our names,
cursors, temporary tables, locks, LISTEN. So foreign code only runs in a session whose role has no more rights than the
owners of the code (migrations/schema.sql, section 15): it gains nothing. The rest of the protection makes later
statements do what they should:

- before a guarded table is used in a transaction, it is locked and compared (schema_check.py), so that its owner
  cannot add code in between;
- after foreign code, statements of the transaction are parsed for each use, under no name;
- after each change that has run foreign code, all settings and the role are set again;
- constraint triggers that wait for the end of the transaction run before progress is moved, as the table's owner;
  those that defer themselves again run in COMMIT, as the session's own role, which has no more rights;
- after the transaction, DISCARD ALL.

Trusted code runs in any session, and is believed to leave the session's state as it is. If it does not, a later
statement fails: its name is unknown after DEALLOCATE ALL, or it exceeds a statement_timeout. PostgreSQL's own worker
has neither. After such an error, the workers of the subscription treat the code of all tables in this way
(supervisor.py).

Remaining effects hurt the tables of the code's owner only: a transaction made read-only fails, and is retried.
Progress is moved by functions that require the worker's fence, which is sent as a parameter and stored nowhere.
"""

from __future__ import annotations

from subscriber.apply.relation_map import LocalRelation, RelationMapping, how_to_trust
from subscriber.connection.pipeline import Pipeline
from subscriber.errors import MappingError
from subscriber.sqlstate import INSUFFICIENT_PRIVILEGE
from subscriber.targets.postgres.session import schema_check
from subscriber.targets.postgres.session.roles import RoleSwitcher
from subscriber.targets.postgres.session.statement_context import StatementContext

_RUN_DEFERRED = "SET CONSTRAINTS ALL IMMEDIATE"


class ForeignCodeGuard:
    """Guards one session against foreign code.

    Attributes:
        has_run: foreign code has run in the session.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        roles: RoleSwitcher,
        shapes: schema_check.SchemaChecker,
        settings: tuple[str, ...] = (),
    ) -> None:
        """Create the guard of a session, whose settings the statements `settings` restore."""
        self.has_run = False
        self._settings = settings
        self._pipeline = pipeline
        self._roles = roles
        self._shapes = shapes
        self._last: LocalRelation | None = None  # whose code ran last in this transaction
        self._partitioned: LocalRelation | None = None  # one that this transaction guards

    @property
    def used(self) -> bool:
        """True if foreign code has run in this transaction."""
        return self._last is not None

    def began(self) -> None:
        """A transaction has begun."""
        self._partitioned = None

    def guard(self, local: LocalRelation, mode: str, note: object) -> None:
        """Queue the lock and the comparison, in the transaction that is going to touch the table."""
        if local.partitioned:
            self._partitioned = local
        if local.schema in local.closed_schemas:  # the owner cannot name it
            self._roles.reset_role(note)
        else:
            self._roles.switch_for_tables([local], note)
        self._pipeline.execute(schema_check.lock(local, mode), note=note)
        self._roles.reset_role(note)
        self._shapes.check(local, self._roles.owner, note)

    def refuse_to_prepare(self) -> None:
        """Before PREPARE TRANSACTION. Raises MappingError if the transaction guards a partitioned table.

        Two transactions cannot hold the lock for that. The next one would wait for COMMIT PREPARED, which is later in
        the stream.
        """
        local = self._partitioned
        if local is not None:
            raise MappingError(
                f'partitioned table "{local.schema}.{local.name}" cannot be changed by a prepared transaction here',
                detail=f'The session\'s role may do more than its owner, "{local.owner}", or the owner of a partition,'
                " who could attach another one with code of its own.",
                hint=how_to_trust([local.owner]),
                sqlstate=INSUFFICIENT_PRIVILEGE,
            )

    def begin(self, mapping: RelationMapping) -> None:
        """The next statements run the table's foreign code."""
        self._last = mapping.local
        self.has_run = True
        self._pipeline.unnamed = True

    def set_again(self, note: object) -> None:
        """Queue what makes the session ours again, as far as that goes inside of the transaction."""
        self._pipeline.execute("RESET ALL", note=note)
        self._roles.reset(note)
        for statement in self._settings:
            self._pipeline.execute(statement, note=note)

    def run_deferred(self, note: StatementContext) -> None:
        """Queue what runs the constraint triggers that wait for the end of the transaction."""
        if self._last is not None:
            self._roles.switch_for_tables([self._last], note)
            self._pipeline.execute(_RUN_DEFERRED, note=note)
            self.set_again(note)

    def clean(self) -> None:
        """Queue DISCARD ALL and the settings, if foreign code has run. The transaction has ended before."""
        if self._last is None:
            return
        self._last = None
        note = StatementContext("DISCARD")
        self._pipeline.execute("DISCARD ALL", note=note)
        self._pipeline.queue_sync()
        self._pipeline.forget()
        self._shapes.forget()
        for statement in self._settings:
            self._pipeline.execute(statement, note=note)
        self._pipeline.queue_sync()
        self._pipeline.unnamed = False
