"""From the publisher's tables to the target's: columns by name, the row to change by replica identity.

A mapping is made when the first change of a table arrives, not when its RELATION message does: with
publish_via_partition_root the publisher announces leaf partitions that need not exist here.

Which row an UPDATE or DELETE means is decided by the *target's* identity: the index named by REPLICA
IDENTITY, else the primary key unless it is deferrable; and only if the publisher sends all of its
columns as key. Without such an index the publisher must send whole rows (FULL), and the whole row is
searched for, NULL equal to NULL. Local columns that the publisher does not have must be NULL as well.

Source: relation.c; GetRelationIdentityOrPK(), check_relation_updatable() in worker.c.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from subscriber.display import sql_identifier, sql_literal, sql_name
from subscriber.errors import MappingError
from subscriber.protocol.encodings import UTF8
from subscriber.protocol.messages import Relation, ReplicaIdentity
from subscriber.protocol.relation_sizes import RelationSizes
from subscriber.quoting import qualified
from subscriber.sqlstate import INSUFFICIENT_PRIVILEGE


@dataclass(frozen=True, slots=True)
class BatchColumnInfo:
    """The facts about a column that batches need (apply/batch/batch.py)."""

    type_oid: int
    type_modifier: int  # -1: none
    not_null: bool
    element: str  # the type without modifier, of a domain that it is of
    element_oid: int
    # Whether an array can carry its values: in text as an array of texts that are cast, unless the cast is a
    # function of its own; in binary as an array of its type, unless it is an array itself, or has no array type.
    text_array: bool
    binary_array: bool
    array_oid: int = 0  # the array type of the element
    # Labels are the same bytes in text and binary, and the owner of an enum may rename it at any moment: no statement
    # names one.
    enum: bool = False


@dataclass(frozen=True, slots=True)
class LocalColumn:
    """A live column of a target table."""

    name: str
    type_name: str  # as format_type() prints it, with schema and modifier: numeric(10,2)
    # The type a value to search for is cast to, because it may have to be rounded, or because the equality
    # operator is one of other types as well. None: not cast; never texts and bits, which a cast would cut.
    search_cast: str | None
    equality: str | None  # qualified operator, as OPERATOR("pg_catalog".=); None: the type has none
    generated: bool  # GENERATED ALWAYS AS (…)
    identity_always: bool  # GENERATED ALWAYS AS IDENTITY: an UPDATE may not name it
    base_type: str | None = None  # base type of a domain; None: the type is not a domain
    batch_info: BatchColumnInfo | None = None  # how many of its values are sent in one array; None: unknown


@dataclass(frozen=True, slots=True)
class Partition:
    """A leaf partition of a target table."""

    label: str  # schema.name
    constraint: str  # as SQL; empty for a lone default partition, which takes every row
    columns: tuple[str, ...]  # in its own order


@dataclass(frozen=True, slots=True)
class ForeignCode:
    """Code that a change of a table runs, of a role that the session's role must not trust."""

    owner: str
    what: str  # "trigger audit: function app.audit()"
    default_of: str | None  # a column; it only runs if the publisher does not send that column
    exceeded: bool  # the session's role may do more than the owner, and the code could do it: it must not run


@dataclass(frozen=True, slots=True)
class LocalRelation:
    """A table of the target, as introspected."""

    oid: int
    schema: str
    name: str
    partitioned: bool
    owner: str
    columns: tuple[LocalColumn, ...]  # in attribute order
    identity: tuple[str, ...]  # columns of the identity index or primary key; empty: there is none
    shape: str  # changes whenever anything here may have changed
    deferrable_key: tuple[str, ...] = ()  # the columns of the primary key, if it is DEFERRABLE and so identifies no row
    # BEFORE row triggers, of a partition too, and rules that fire for replicated changes may turn one into nothing.
    has_row_suppressing_trigger: bool = False
    # Those of the table and of its columns' types that the role may not use as which changes are applied.
    closed_schemas: tuple[str, ...] = ()
    may_set_role: bool = True  # the subscription's owner may SET ROLE to the table's
    partitions: tuple[Partition, ...] = ()  # the leaves of a partitioned table
    batch_exclusion: str | None = (
        None  # why changes must be applied one after another, in a few words; None: see apply/batch/batch.py
    )
    other_unique: bool = False  # rows can be in each other's way otherwise than by their identity
    # All columns of the unique indexes that make it so; None: they are not only of plain columns.
    unique_columns: tuple[str, ...] | None = None
    has_only_type_checks: bool = (
        False  # nothing but its columns' types can refuse a row: no CHECK, expression, large index key
    )
    foreign: tuple[ForeignCode, ...] = ()
    # Foreign code may run in the session, or could: the table has to be locked and compared before it is touched.
    guarded: bool = False
    # Code of the table may change the session's state: it is set again after each change.
    changes_session: bool = False

    @property
    def only(self) -> str:
        """SQL for the table with its partitions, and without tables that inherit from it. Their rows are others'."""
        return f"{'' if self.partitioned else 'ONLY '}{qualified(self.schema, self.name)}"

    @property
    def code_of(self) -> tuple[str, ...]:
        """The roles whose code is foreign."""
        return tuple(sorted({code.owner for code in self.foreign}))


_PLAIN_NAME = re.compile(r"[a-z_][a-z0-9_]*")
CODES_SHOWN = 3  # in an error


class Plans(dict[object, object]):
    """Plans by shape, cleared when there are too many: a table without key has a shape for each pattern of NULLs."""

    LIMIT = 1000

    def __setitem__(self, key: object, plan: object) -> None:
        if len(self) >= self.LIMIT and key not in self:
            self.clear()
        super().__setitem__(key, plan)


@dataclass(frozen=True, slots=True)
class Unsearchable:
    """Why the row that an UPDATE or DELETE is about cannot be found, and what to do about it."""

    message: str
    hint: str


@dataclass(slots=True)
class RelationMapping:
    """The mapping of the rows of a published table to those of a target table.

    `attributes[i]` is the local column of the publisher's column i. `search` has the indexes, in the
    publisher's column order, of the columns that identify a row; None means the whole row does.
    `unsearchable` is why no UPDATE or DELETE is possible; None: it is.
    """

    remote: Relation
    local: LocalRelation
    attributes: tuple[LocalColumn, ...]
    search: tuple[int, ...] | None
    unsearchable: Unsearchable | None
    local_only: tuple[LocalColumn, ...]  # no counterpart on the publisher, not generated
    codec: str = UTF8  # of the texts in its changes, see protocol/encodings.py
    plans: Plans = field(default_factory=Plans)  # statements made for it, by shape of change
    runs_foreign_code: bool = False
    unique_values_change: bool = False  # updates have been seen to change some of local.unique_columns
    # Columns by index to which an UPDATE adds the publisher's difference, with the type in which it is computed.
    delta_types: Mapping[int, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """schema.table, as PostgreSQL's messages name it."""
        return f"{self.local.schema}.{self.local.name}"


class RelationMap:
    """The publisher's tables by its OIDs, as described by the last RELATION message of each."""

    def __init__(self, before: RelationMap | None = None, limit: int | None = None) -> None:
        """Create an empty map.

        Args:
            before: mappings that hold as long as a table is described as it was there.
            limit: bytes of memory for the descriptions. None: there is no limit.
        """
        self._sizes = RelationSizes(limit)
        self._relations: dict[int, Relation] = {}
        self._mappings: dict[int, RelationMapping] = {}
        self._before = before

    def update(self, relation: Relation) -> None:
        """A RELATION message replaces everything known of that OID.

        The publisher repeats itself: after TRUNCATE, in each streamed transaction. The same description has the same
        mapping. Whether the target's table is still as it was is checked in each transaction
        (targets/postgres/session/schema_check.py).

        Raises:
            ProtocolError: the descriptions exceed the limit.
        """
        self._sizes.add(relation)
        known = self._mappings.get(relation.relid)
        if known is not None and not _is_same(known.remote, relation):
            del self._mappings[relation.relid]
        self._relations[relation.relid] = relation

    def relation(self, relid: int) -> Relation:
        try:
            return self._relations[relid]
        except KeyError:
            raise MappingError(f"no relation map entry for remote relation ID {relid}") from None

    def get(self, relid: int) -> RelationMapping | None:
        """The mapping made before, or None when it has to be made."""
        mapping = self._mappings.get(relid)
        if mapping is None and self._before is not None and relid in self._relations:
            mapping = self._before.get(relid)
            if mapping is None or not _is_same(mapping.remote, self._relations[relid]):
                return None
            self._mappings[relid] = mapping
        return mapping

    def put(self, mapping: RelationMapping) -> None:
        self._mappings[mapping.remote.relid] = mapping

    def take_over(self, later: RelationMap) -> None:
        """Add the relations of a streamed transaction that has committed.

        The publisher tracks the sent relations in the same way: those sent inside a transaction that was rolled back
        are sent again. Source: cleanup_rel_sync_cache() in pgoutput.c.
        """
        for relation in later._relations.values():
            self.update(relation)


def _is_same(one: Relation, other: Relation) -> bool:
    """Return True if two messages describe a table alike. Their transactions may differ."""
    return one is other or replace(one, xid=None) == replace(other, xid=None)


def map_relation(remote: Relation, local: LocalRelation, codec: str = UTF8) -> RelationMapping:
    """Raises MappingError when published columns are missing or generated on the target."""
    by_name = {column.name: column for column in local.columns}
    label = f"{remote.schema}.{remote.name}"
    missing = [c.name for c in remote.columns if c.name not in by_name]
    if missing:
        raise MappingError(
            f'logical replication target relation "{label}" is missing replicated column{"s" * (len(missing) > 1)}: '
            + _quoted(missing),
            hint=f"Add the missing column{'s' * (len(missing) > 1)} to the target table.",
        )
    generated = [c.name for c in remote.columns if by_name[c.name].generated]
    if generated:
        raise MappingError(
            f'logical replication target relation "{label}" has incompatible generated '
            f"column{'s' * (len(generated) > 1)}: " + _quoted(generated)
        )
    remote_names = {c.name for c in remote.columns}
    foreign = [code for code in local.foreign if code.default_of not in remote_names]
    refuse_exceeded(local, foreign)
    search, unsearchable = _search(remote, local, label)
    return RelationMapping(
        remote=remote,
        codec=codec,
        local=local if not foreign else replace(local, batch_exclusion="foreign code"),
        runs_foreign_code=bool(foreign) or local.changes_session,
        attributes=tuple(by_name[c.name] for c in remote.columns),
        search=search,
        unsearchable=unsearchable,
        local_only=tuple(c for c in local.columns if c.name not in remote_names and not c.generated),
    )


def map_same_columns(remote: Relation, codec: str = UTF8) -> RelationMapping:
    """Map a published table to one of the same name and columns, in which rows are found by the replica identity.

    For targets that have no description of their own tables.

    Args:
        remote: the published table.
        codec: of the texts in its changes, see protocol/encodings.py.
    """
    full = remote.replica_identity is ReplicaIdentity.FULL
    local = LocalRelation(
        oid=remote.relid,
        schema=remote.schema,
        name=remote.name,
        partitioned=False,
        owner="",
        columns=tuple(LocalColumn(column.name, "", None, "=", False, False) for column in remote.columns),
        identity=() if full else tuple(column.name for column in remote.columns if column.is_key),
        shape="",
    )
    return map_relation(remote, local, codec)


def refuse_exceeded(local: LocalRelation, foreign: Sequence[ForeignCode]) -> None:
    """Raises MappingError (42501) if one of `foreign` must not run in the session."""
    exceeded = [code for code in foreign if code.exceeded]
    if not exceeded:
        return
    owners = sorted({code.owner for code in exceeded})
    more = f", and {len(exceeded) - CODES_SHOWN} more" if len(exceeded) > CODES_SHOWN else ""
    raise MappingError(
        f'changes of table "{local.schema}.{local.name}" run code of role{"s" * (len(owners) > 1)} {_quoted(owners)}, '
        "which could do there whatever the session's role may do",
        detail=f"{'; '.join(code.what for code in exceeded[:CODES_SHOWN])}{more}.",
        hint=how_to_trust(owners),
        sqlstate=INSUFFICIENT_PRIVILEGE,
    )


def trust_option(owners: Sequence[str]) -> str:
    """Return the option of a subscription that trusts these owners."""
    names = ", ".join(name if _PLAIN_NAME.fullmatch(name) else sql_identifier(name) for name in owners)
    return f"trusted_owners = {sql_literal(names)}"


def how_to_trust(owners: Sequence[str]) -> str:
    """Describe the ways to allow code of these owners, which the session must not run."""
    return (
        'Apply changes as a role that may do no more than these owners: "subscriber check --fix" says how.'
        f" Or trust them, as a superuser: ALTER SUBSCRIPTION ... SET ({trust_option(owners)})."
    )


def _keys(remote: Relation) -> list[str]:
    return [sql_identifier(column.name) for column in remote.columns if column.is_key]


def _quoted(names: list[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _search(remote: Relation, local: LocalRelation, label: str) -> tuple[tuple[int, ...] | None, Unsearchable | None]:
    if not local.identity:
        if remote.replica_identity is ReplicaIdentity.FULL:
            return None, None
        table = sql_name(local.schema, local.name)
        if local.deferrable_key:
            columns = ", ".join(sql_identifier(name) for name in local.deferrable_key)
            index = sql_identifier(f"{local.name[:50]}_identity")
            return None, Unsearchable(
                f'the primary key of logical replication target relation "{label}" is DEFERRABLE, '
                "so it does not identify a row",
                f"On the target: CREATE UNIQUE INDEX {index} ON {table} ({columns}); "
                f"ALTER TABLE {table} REPLICA IDENTITY USING INDEX {index};",
            )
        return None, Unsearchable(
            f'logical replication target relation "{label}" has neither REPLICA IDENTITY index nor PRIMARY KEY '
            "and published relation does not have REPLICA IDENTITY FULL",
            f"On the target: ALTER TABLE {table} ADD PRIMARY KEY ({', '.join(_keys(remote)) or '…'});",
        )
    keys = {c.name: i for i, c in enumerate(remote.columns) if c.is_key}
    if not all(name in keys for name in local.identity):
        expected = ", ".join(sql_identifier(name) for name in local.identity)
        return None, Unsearchable(
            "publisher did not send replica identity column expected by the logical replication target "
            f'relation "{label}"',
            f"The target finds rows by ({expected}), the publisher sends ({', '.join(_keys(remote))}). "
            "Give both the same primary key or REPLICA IDENTITY.",
        )
    return tuple(keys[name] for name in local.identity), None
