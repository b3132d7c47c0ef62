"""Resolution of conflicts by a policy: changes that read the target before they are applied.

The reference path sends a statement and learns of a conflict from its result, if at all. Here the
affected rows are read and locked first, in the same transaction: the row of an UPDATE or DELETE, and the rows that have
a key which the change would give to another row. A policy resolves the conflict (apply/conflicts/policy.py), the
history records it (history.py), and the rest of the change is applied as usual. Every result is awaited. Changes
without a policy do not use this module.

A row that is inserted between the query and the statement makes the statement fail, as without a policy, and the next
attempt finds it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from subscriber.apply.conflicts import types
from subscriber.apply.conflicts.policy import Policy, PolicyOutcome, Rule, decide, is_later_than_deletion
from subscriber.apply.conflicts.types import Conflict, ConflictType, RowWriter
from subscriber.apply.error_context import error_context
from subscriber.apply.relation_map import Partition, RelationMapping
from subscriber.apply.transaction import RemoteTransaction
from subscriber.errors import ConflictError
from subscriber.protocol.encodings import encode
from subscriber.protocol.messages import Delete, Insert, OldPart, Relation, Update, moment
from subscriber.protocol.tuple_data import NULL, TEXT, UNCHANGED, TupleData
from subscriber.targets.postgres.conflicts.deleted_rows import DeletedRows
from subscriber.targets.postgres.conflicts.history import History
from subscriber.targets.postgres.conflicts.row_lookup import FoundRow, RowLookup, columns_of
from subscriber.targets.postgres.session.progress import ProgressRecord
from subscriber.targets.postgres.session.statement_context import OnConflict, StatementContext
from subscriber.targets.postgres.session.target_session import TargetSession
from subscriber.targets.postgres.sql import deleted_rows, lookup_queries, row_statements
from subscriber.targets.postgres.sql.parameters import NO_ROW, Row, bind, require_columns, searched
from subscriber.targets.postgres.sql.row_statements import NEW, OLD, Plan

RowChange = Insert | Update | Delete
# Reads columns of a published table's row with this key from the publisher. Returns None if that is impossible.
ReadPublished = Callable[[Relation, dict[str, str], list[str]], Awaitable[dict[str, str | None] | None]]


@dataclass(frozen=True, slots=True)
class UnresolvedConflict:
    """The conflict that ended the session."""

    conflict: Conflict
    rule: Rule
    mapping: RelationMapping
    transaction: RemoteTransaction


@dataclass(frozen=True, slots=True)
class _Decision:
    outcome: PolicyOutcome
    rule: Rule
    row: Mapping[str, str | None] | None = None  # what a function wants the row to have


class ConflictResolution:
    """Resolves conflicts in one apply session.

    Attributes:
        refusal: the conflict that has ended the session. None: there is none.
    """

    def __init__(
        self,
        session: TargetSession,
        progress: ProgressRecord,
        deleted: DeletedRows | None,
        on_conflict: OnConflict,
        *,
        timed: bool,
        read_published: ReadPublished | None = None,
    ) -> None:
        """Create the resolution.

        Args:
            session: the session, which has the conflict options of the subscription.
            progress: the progress record, which proves the right to record conflicts.
            deleted: finds deleted rows. None: the target does not remember them.
            on_conflict: called with each conflict that is resolved.
            timed: the target tracks commit timestamps.
            read_published: reads values from the publisher. None: the publisher is not asked.
        """
        self.refusal: UnresolvedConflict | None = None
        self._lookup = RowLookup(session.pipeline, timed=timed)
        self._pipeline = session.pipeline
        self._roles = session.roles
        self._rules = session.rules
        self._policies = session.rules.policies
        self._history = History(session.rules)
        self._progress = progress
        self._deleted = deleted
        self._on_conflict = on_conflict
        self._origin = session.origin
        self._wording = session.wording
        self._read_published = read_published
        self._concerned: dict[tuple[str, str, type], bool] = {}

    def applies_to(self, mapping: RelationMapping, change: RowChange) -> bool:
        """Return True if `change` must be passed to resolve()."""
        local, kind = mapping.local, type(change)
        key = (local.schema, local.name, kind)
        concerned = self._concerned.get(key)
        if concerned is None:
            concerned = self._concerned[key] = self._rules.concern(local, kind)
        return concerned

    async def resolve(self, change: RowChange, note: StatementContext) -> RowChange | None:
        """Return the rest of `change` to apply, or None; the session acts as the table's owner.

        Raises ConflictError if the policy is to stop, and MappingError.
        """
        if isinstance(change, Insert):
            return await self._insert(change, note, may_be_deleted=True)
        row_statements.require_search(_mapping(note))
        old = change.old.split() if change.old is not None else NO_ROW
        if isinstance(change, Delete):
            return await self._delete(change, old, note)
        return await self._update(change, old, note)

    # --- one kind of change each ----------------------------------------------------------------

    async def _insert(self, change: Insert, note: StatementContext, *, may_be_deleted: bool = False) -> Insert | None:
        """Insert, or resolve a conflict with the rows that have the new row's keys.

        `may_be_deleted`: the row may have been deleted at a later time.
        """
        mapping = _mapping(note)
        holders = await self._holders(change.new, note)
        identity = set(mapping.local.identity)
        is_absent = not any(set(key) == identity for *_, key in holders)
        if may_be_deleted and is_absent and await self._is_deleted_later(change, note):
            return None
        if not holders:
            return change
        conflict = await self._unique(change, holders, note)
        decision = await self._decide(conflict, note)
        if decision.outcome is PolicyOutcome.KEEP:
            self._record_decision(conflict, decision, "skipped", note)
            return None
        # The row with the same identity stays, because columns that only the target has keep their values.
        kept = next((row for row, _, key in holders if set(key) == identity), holders[0][0])
        self._record_decision(
            conflict, decision, "updated" if len({row.place for row, *_ in holders}) == 1 else "replaced", note
        )
        self._delete_blocking_rows([row for row, *_ in holders if row.place != kept.place], note)
        new = _with(mapping, change.new, decision.row) if decision.row is not None else change.new
        status, values = new.split()
        self._run_at(kept.place, lookup_queries.update_at_place(mapping, status), (status, values), note)
        return None

    async def _update(self, change: Update, old: Row, note: StatementContext) -> RowChange | None:
        mapping = _mapping(note)
        row = await self._searched(NEW if change.old is None else OLD, change.new.split(), old, note)
        if row is None:
            return await self._missing(change, note)
        if self._was_written_by_other_origin(row, ConflictType.UPDATE_ORIGIN_DIFFERS, mapping):
            conflict = types.differs(
                mapping,
                await self._as_text(change, note),
                row.writer,
                row.values,
                self._wording,
                _leaf(mapping, row.label),
            )
            decision = await self._decide(conflict, note)
            added = decision.rule.policy is Policy.ADD_DELTA
            self._record_decision(conflict, decision, "added" if added else _APPLIED[decision.outcome], note)
            if decision.outcome is PolicyOutcome.KEEP:
                return None
            if decision.row is not None:
                change = replace(change, new=_with(mapping, change.new, decision.row))
            if decision.rule.policy is Policy.LAST_UPDATE_WINS:
                change = replace(change, new=await self._complete(change, note))
        return await self._update_to_key(change, row, note)

    async def _update_to_key(self, change: Update, row: FoundRow, note: StatementContext) -> Update | None:
        """Change an existing row; resolve a conflict with rows that have its new keys."""
        mapping = _mapping(note)
        if not self._policies.concern_keys((mapping.local.schema, mapping.local.name)):
            return change
        holders = [holder for holder in await self._holders(change.new, note) if holder[0].place != row.place]
        if not holders:
            return change
        conflict = await self._unique(change, holders, note)
        decision = await self._decide(conflict, note)
        if decision.outcome is PolicyOutcome.KEEP:
            self._record_decision(conflict, decision, "skipped", note)
            return None
        self._record_decision(conflict, decision, "replaced", note)
        self._delete_blocking_rows([holder for holder, *_ in holders], note)
        return change if decision.row is None else replace(change, new=_with(mapping, change.new, decision.row))

    async def _delete(self, change: Delete, old: Row, note: StatementContext) -> RowChange | None:
        mapping = _mapping(note)
        row = await self._searched(OLD, NO_ROW, old, note)
        if row is None:
            return await self._missing(change, note)
        if not self._was_written_by_other_origin(row, ConflictType.DELETE_ORIGIN_DIFFERS, mapping):
            return change
        conflict = types.differs(
            mapping, await self._as_text(change, note), row.writer, row.values, self._wording, _leaf(mapping, row.label)
        )
        decision = await self._decide(conflict, note)
        self._record_decision(
            conflict, decision, "updated" if decision.row is not None else _APPLIED[decision.outcome], note
        )
        if decision.outcome is PolicyOutcome.KEEP:
            return None
        if decision.row is None:
            return change
        nothing = TupleData.join(bytes([UNCHANGED]) * len(mapping.attributes), [None] * len(mapping.attributes))
        return Update(change.xid, change.relid, change.old_part, change.old, _with(mapping, nothing, decision.row))

    async def _missing(self, change: Update | Delete, note: StatementContext) -> Insert | None:
        mapping = _mapping(note)
        leaf = await self._partition(change, note)
        deleted = None
        if isinstance(change, Update):
            deleted = await self._deletion(searched(change).split(), note)
        conflict = types.missing(mapping, await self._as_text(change, note), self._wording, leaf, deleted)
        decision = await self._decide(conflict, note)
        if isinstance(change, Delete):
            self._remember(change, note)
        new = None
        if decision.outcome is PolicyOutcome.APPLY:
            if decision.row is not None:
                nothing = TupleData.join(bytes([NULL]) * len(mapping.attributes), [None] * len(mapping.attributes))
                new = _with(mapping, change.new if isinstance(change, Update) else nothing, decision.row)
            elif isinstance(change, Update):
                new = change.new if deleted is None else await self._complete(change, note)
        # Of a large value that did not change nothing was sent: there is no whole row to insert.
        if new is None or UNCHANGED in new.split()[0]:
            self._record_decision(conflict, decision, "skipped", note)
            return None
        self._record_decision(conflict, decision, "inserted", note)
        return await self._insert(Insert(change.xid, change.relid, new), note)

    # --- deleted rows -----------------------------------------------------------------------------

    async def _deletion(self, row: Row, note: StatementContext) -> RowWriter | None:
        """Return the transaction of another origin that deleted a row last; None if there is none or it is unknown."""
        mapping = _mapping(note)
        if self._deleted is None or not deleted_rows.has_key(mapping):
            return None
        answers: list[RowWriter | None] = []
        role = self._roles.reset_role(note)
        self._deleted.find(self._pipeline, mapping, row, note, answers.append)
        self._roles.restore_role(role, note)
        await self._pipeline.sync()
        return answers[0]

    async def _is_deleted_later(self, change: Insert, note: StatementContext) -> bool:
        """Return True if the row was deleted after it was inserted on the publisher. Then the conflict is recorded.

        An INSERT conflicts with a deletion only where the policy compares times. PostgreSQL applies it.
        """
        mapping = _mapping(note)
        table = mapping.local.schema, mapping.local.name
        if not self._policies.compares_deletions(table):
            return False
        writer = await self._deletion(change.new.split(), note)
        if writer is None or is_later_than_deletion(writer, _transaction(note).commit_time):
            return False
        leaf = await self._partition(change, note)
        shown = await self._lookup.render_as_text(mapping, change, note)
        conflict = types.inserted_before_deletion(mapping, shown, self._wording, leaf, writer)
        rule = self._policies.rule(table, ConflictType.UPDATE_DELETED)
        self._record_decision(conflict, _Decision(PolicyOutcome.KEEP, rule), "skipped", note)
        return True

    def _remember(self, change: Delete, note: StatementContext) -> None:
        """Remember a replicated DELETE of a missing row: a third server may have changed that row earlier."""
        mapping = _mapping(note)
        compares = self._policies.compares_deletions((mapping.local.schema, mapping.local.name))
        if self._deleted is None or not compares or not deleted_rows.has_key(mapping):
            return
        role = self._roles.reset_role(note)
        self._deleted.remember(self._pipeline, mapping, change.old.split(), note)
        self._roles.restore_role(role, note)

    async def _complete(self, change: Update, note: StatementContext) -> TupleData:
        """Return the new row with the large values that did not change, as far as possible.

        They are in the old row (REPLICA IDENTITY FULL), or are read from the publisher. If the publisher has changed
        the row again, its later change follows.
        """
        mapping = _mapping(note)
        new = _completed(change)
        absent = [index for index, kind in enumerate(new.split()[0]) if kind == UNCHANGED]
        if not absent or self._read_published is None or mapping.search is None:
            return new
        shown = types.texts(mapping, (await self._lookup.render_as_text(mapping, change, note)).new)
        key = {mapping.remote.columns[i].name: shown.get(mapping.attributes[i].name) for i in mapping.search}
        published = await self._read_published(
            mapping.remote,
            {name: value for name, value in key.items() if value is not None},
            [mapping.remote.columns[index].name for index in absent],
        )
        if published is None:
            return new
        return _with(
            mapping, new, {mapping.attributes[i].name: published[mapping.remote.columns[i].name] for i in absent}
        )

    # --- reading rows -----------------------------------------------------------------------------

    async def _searched(self, row: int, new: Row, old: Row, note: StatementContext) -> FoundRow | None:
        """The row that an UPDATE or DELETE is about, locked."""
        mapping = _mapping(note)
        require_columns(mapping, (new, old)[row][0])
        if mapping.search is None:
            plan = row_statements.find(mapping, row, (new, old)[row][0], own_first=note.prefer_own_rows)
            self._run(plan, new, old, note)
        plan = lookup_queries.searched(mapping, row, timed=self._lookup.timed)
        (answer,) = await self._lookup.fetch_rows([plan], new, old, note)
        return answer[0] if answer else None

    async def _holders(self, new: TupleData, note: StatementContext) -> list[tuple[FoundRow, str, list[str]]]:
        """Rows that have a key of the new row, locked, each with the unique index and its columns."""
        mapping = _mapping(note)
        row = new.split()
        require_columns(mapping, row[0])
        indexes = await self._lookup.unique_indexes(mapping, row, note=note)
        plans = [lookup_queries.holders(mapping, places, timed=self._lookup.timed) for _, _, places in indexes]
        answers = await self._lookup.fetch_rows(plans, row, NO_ROW, note) if plans else []
        return [(holder, *index[:2]) for index, rows in zip(indexes, answers, strict=True) for holder in rows]

    async def _unique(
        self, change: Insert | Update, holders: list[tuple[FoundRow, str, list[str]]], note: StatementContext
    ) -> Conflict:
        mapping = _mapping(note)
        label = holders[0][0].label
        names = tuple(column.name for column in mapping.local.columns)
        rows = [holder.local_row(mapping, names, index, key) for holder, index, key in holders]
        shown = await self._lookup.render_as_text(mapping, change, note)
        return types.unique(mapping, shown, label, columns_of(mapping, label), rows, self._wording)

    async def _partition(self, change: RowChange, note: StatementContext) -> Partition | None:
        """Return the partition in which the missing row would be."""
        mapping = _mapping(note)
        if not mapping.local.partitions:
            return None
        values = (change.new if isinstance(change, Insert) else searched(change)).split()
        number = await self._lookup.fetch_value(row_statements.find_partition(mapping, values[0]), values, note)
        return mapping.local.partitions[int(number)] if number is not None else None

    async def _as_text(self, change: Update | Delete, note: StatementContext) -> Update | Delete:
        return await self._lookup.render_as_text(_mapping(note), change, note)

    def _was_written_by_other_origin(self, row: FoundRow, what: ConflictType, mapping: RelationMapping) -> bool:
        """Return True if another origin wrote the row last, as far as the target knows.

        The origin of a table's copy is dropped after the copy, so copied rows have an origin that does not exist. Where
        times are compared they count as another origin's. Any other policy treats them as ours: otherwise it would keep
        copied rows against later changes of the publisher.
        """
        writer = row.writer
        if writer.committed is None or types.is_ours(writer.origin, self._origin):
            return False
        if writer.foreign and (writer.origin is None or writer.origin.startswith(f"{self._origin}_")):
            rule = self._policies.rule((mapping.local.schema, mapping.local.name), what)
            return rule.policy in (Policy.DEFAULT, Policy.LAST_UPDATE_WINS)
        return True

    # --- deciding ---------------------------------------------------------------------------------

    async def _decide(self, conflict: Conflict, note: StatementContext) -> _Decision:
        mapping, transaction = _mapping(note), _transaction(note)
        table = mapping.local.schema, mapping.local.name
        rule = self._policies.rule(table, conflict.type, several_rows=conflict.several_rows)
        policy = rule.policy
        if rule.function is not None:
            answer = await self._call(rule, conflict, note)
            if isinstance(answer, Mapping):
                return _Decision(PolicyOutcome.APPLY, rule, answer)
            policy = answer
        outcome = decide(policy, conflict, transaction.commit_time, self._origin)
        if outcome is PolicyOutcome.ERROR:
            raise self._refuse(conflict, rule, note)
        return _Decision(outcome, rule)

    async def _call(self, rule: Rule, conflict: Conflict, note: StatementContext) -> Policy | Mapping[str, str | None]:
        """Call the function and return its result. An invalid result is an error that stops the stream."""
        assert rule.function is not None
        mapping = _mapping(note)
        time = moment(_transaction(note).commit_time)
        try:
            answer = await self._rules.resolvers[rule.function](replace(conflict, commit_time=time))
        except Exception as error:  # the exception's own text may have values
            what = f'Conflict resolver "{rule.function}" raised {type(error).__name__}.'
            raise self._refuse(conflict, rule, note, what) from error
        if isinstance(answer, Mapping):
            unknown = sorted(str(name) for name in answer if name not in {c.name for c in mapping.attributes})
            if not unknown:
                return {name: _text(value) for name, value in answer.items()}
            what = f"gave values for columns that are not replicated: {', '.join(unknown)}."
        elif answer in list(Policy) and answer not in (Policy.CALL, Policy.ADD_DELTA):
            return Policy(answer)
        else:
            what = "answered with neither a policy nor a row."
        raise self._refuse(conflict, rule, note, f'Conflict resolver "{rule.function}" {what}')

    def _refuse(self, conflict: Conflict, rule: Rule, note: StatementContext, hint: str | None = None) -> ConflictError:
        """The error that stops the stream."""
        mapping, transaction = _mapping(note), _transaction(note)
        self.refusal = UnresolvedConflict(conflict, rule, mapping, transaction)
        error = ConflictError(
            conflict.message,
            detail=self._history.detail(conflict),
            exact_detail=conflict.exact_detail,
            conflict_type=conflict.type,
        )
        error.locate(mapping.label, transaction.xid, transaction.finish_lsn or None).amend(hint=hint)
        error.context.append(error_context(self._origin, note.message, self._wording, mapping.label, None, transaction))
        return error

    def _record_decision(
        self, conflict: Conflict, decision: _Decision, resolution: str, note: StatementContext
    ) -> None:
        """Log the conflict, and record it in the transaction."""
        mapping, rule = _mapping(note), decision.rule
        if rule.policy is not Policy.DEFAULT:
            conflict = replace(conflict, resolution=f'{resolution}, by conflict policy "{rule}"')
        self._on_conflict(conflict, note)
        role = self._roles.reset_role(note)
        self._history.record(
            self._pipeline, self._progress, conflict, mapping.local.oid, _transaction(note), rule, resolution, note
        )
        self._roles.restore_role(role, note)

    # --- making way -------------------------------------------------------------------------------

    def _delete_blocking_rows(self, rows: list[FoundRow], note: StatementContext) -> None:
        """Delete rows of the target."""
        for place in dict.fromkeys(row.place for row in rows):
            self._run_at(place, lookup_queries.delete_at_place(_mapping(note)), NO_ROW, note)

    def _run_at(self, place: str, plan: Plan, new: Row, note: StatementContext) -> None:
        if not _mapping(note).local.partitioned:
            place = place.partition(" ")[2]
        self._pipeline.execute(lookup_queries.SET_PLACE, parameters=self._pipeline.texts((place,)), note=note)
        self._run(plan, new, NO_ROW, note)

    def _run(self, plan: Plan, new: Row, old: Row, note: StatementContext) -> None:
        formats, parameters = bind(plan, new, old)
        self._pipeline.execute(plan.sql, formats, parameters, note=note)


_APPLIED = {PolicyOutcome.APPLY: "applied", PolicyOutcome.KEEP: "skipped"}


def _mapping(note: StatementContext) -> RelationMapping:
    assert note.mapping is not None
    return note.mapping


def _transaction(note: StatementContext) -> RemoteTransaction:
    assert note.transaction is not None
    return note.transaction


def _leaf(mapping: RelationMapping, label: str) -> Partition | None:
    return next((leaf for leaf in mapping.local.partitions if leaf.label == label), None)


def _with(mapping: RelationMapping, row: TupleData, given: Mapping[str, str | None]) -> TupleData:
    """`row` with the given values in it, as text."""
    status, values = row.split()
    changed = bytearray(status)
    for index, column in enumerate(mapping.attributes):
        if column.name in given:
            value = given[column.name]
            changed[index] = NULL if value is None else TEXT
            values[index] = None if value is None else encode(value, mapping.codec)
    return TupleData.join(bytes(changed), values)


def _completed(change: Update) -> TupleData:
    """The new row, with the large values that did not change if the publisher sent the old row (REPLICA IDENTITY FULL).

    A row that wins against another version must not keep values of that version.
    """
    status, values = change.new.split()
    if UNCHANGED not in status or change.old_part is not OldPart.ROW or change.old is None:
        return change.new
    old_status, old_values = change.old.split()
    completed = bytearray(status)
    for index, kind in enumerate(status):
        if kind == UNCHANGED:
            completed[index], values[index] = old_status[index], old_values[index]
    return TupleData.join(bytes(completed), values)


def _text(value: object) -> str | None:
    """A value a function gave: texts are taken as they are."""
    if value is None or isinstance(value, str):
        return value
    return f"\\x{value.hex()}" if isinstance(value, bytes | bytearray) else str(value)
