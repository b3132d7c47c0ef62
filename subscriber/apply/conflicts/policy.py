"""Conflict policies: parse the option conflict_policy, and find the rule for a conflict.

    last_update_wins
    public.t: keep_local, *: error
    public.t insert_exists: apply_remote, update_missing: apply_remote, public.u: call merge
    public.account(balance): add_delta

An entry names a table, a type of conflict, both, or neither (`*`, or only the policy). The most specific entry
decides: table and type, then table, then type, then neither. The order of the entries has no meaning.

The policy add_delta is for columns of a table, and decides about update_origin_differs in that table: an UPDATE adds
the difference of the publisher's values to the target's value. No policy that may keep the row of the target can be
combined with it. A row that has received a difference counts as a row of the publisher, so a later comparison of
times would have another result on the other side.

A policy without a type of conflict leaves two cases out:

- multiple_unique_conflicts with several rows of the target stays an error under apply_remote and last_update_wins,
  which would delete all these rows but one. Name the type to allow that.
- last_update_wins leaves missing rows alone, because the time of their deletion is unknown. With retain_dead_tuples
  it is known, and the conflict is update_deleted.

No row is read in advance where a policy has the same effect as none (error, for an existing key).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from subscriber.apply.conflicts.types import Conflict, ConflictType, LocalRow, RowWriter, is_ours
from subscriber.errors import StatementError
from subscriber.protocol.messages import Delete, Insert, Update
from subscriber.sqlstate import INVALID_PARAMETER_VALUE

Table = tuple[str, str]  # schema and name, on the target

_UNIQUE = (ConflictType.INSERT_EXISTS, ConflictType.UPDATE_EXISTS, ConflictType.MULTIPLE_UNIQUE_CONFLICTS)
_MISSING = (ConflictType.UPDATE_MISSING, ConflictType.DELETE_MISSING)
_ABSENT = (*_MISSING, ConflictType.UPDATE_DELETED)
_DIFFERS = (ConflictType.UPDATE_ORIGIN_DIFFERS, ConflictType.DELETE_ORIGIN_DIFFERS)

# The conflicts that a change can meet.
_MET_BY: dict[type, tuple[ConflictType, ...]] = {
    Insert: (ConflictType.INSERT_EXISTS, ConflictType.MULTIPLE_UNIQUE_CONFLICTS),
    Update: (
        ConflictType.UPDATE_MISSING,
        ConflictType.UPDATE_DELETED,
        ConflictType.UPDATE_ORIGIN_DIFFERS,
        ConflictType.UPDATE_EXISTS,
        ConflictType.MULTIPLE_UNIQUE_CONFLICTS,
    ),
    Delete: (ConflictType.DELETE_MISSING, ConflictType.DELETE_ORIGIN_DIFFERS),
}


class Policy(StrEnum):
    DEFAULT = "default"  # what PostgreSQL does: an error, or the row is skipped, or changed all the same
    ERROR = "error"  # the stream stops
    SKIP = "skip"  # the change is not applied
    APPLY_REMOTE = "apply_remote"  # the target becomes what the publisher has
    KEEP_LOCAL = "keep_local"  # the target stays as it is
    LAST_UPDATE_WINS = "last_update_wins"  # the row version that was committed later wins
    CALL = "call"  # a function of the embedding program decides
    ADD_DELTA = "add_delta"  # of columns: the difference of the publisher's values is added to the target's value


class PolicyOutcome(StrEnum):
    """The way in which one conflict is resolved."""

    ERROR = "error"
    KEEP = "keep"  # the change is not applied
    APPLY = "apply"


@dataclass(frozen=True, slots=True)
class Rule:
    policy: Policy
    function: str | None = None  # of CALL: the name it is registered by

    def __str__(self) -> str:
        return self.policy if self.function is None else f"{self.policy} {self.function}"


_DEFAULT = Rule(Policy.DEFAULT)
_ADD_DELTA = Rule(Policy.ADD_DELTA)


class Policies:
    """A subscription's conflict_policy. Falsy when it has none."""

    def __init__(
        self,
        rules: Mapping[tuple[Table | None, ConflictType | None], Rule],
        delta_columns: Mapping[Table, tuple[str, ...]],
    ) -> None:
        """`delta_columns` are the columns with the policy add_delta."""
        self._rules = dict(rules)
        self._delta_columns = dict(delta_columns)
        self._rules.update(((table, ConflictType.UPDATE_ORIGIN_DIFFERS), _ADD_DELTA) for table in delta_columns)

    def __bool__(self) -> bool:
        return bool(self._rules)

    def delta_columns(self, table: Table) -> tuple[str, ...]:
        """Return the names of the columns to which differences are added; empty for most tables."""
        return self._delta_columns.get(table, ())

    def rule(self, table: Table, what: ConflictType, *, several_rows: bool = False) -> Rule:
        """Return the rule for a conflict of this type in this table, with one or with several rows of the target."""
        for key in ((table, what), (table, None), (None, what), (None, None)):
            rule = self._rules.get(key)
            if rule is not None:
                return rule if key[1] is not None or _reaches(rule.policy, what, several_rows) else _DEFAULT
        return _DEFAULT

    def concern(self, table: Table, change: type) -> bool:
        """Return True if a change of this class (Insert, Update, Delete) must read the row before it is applied."""
        types = _MET_BY[change]
        return self._decide(table, types) or (change is not Update and self.compares_deletions(table))

    def compares_deletions(self, table: Table) -> bool:
        """Return True if the time of each change is compared with the time when its row was deleted."""
        return self.rule(table, ConflictType.UPDATE_DELETED).policy is Policy.LAST_UPDATE_WINS

    def concern_keys(self, table: Table) -> bool:
        """Return True if an UPDATE must read the rows that have the keys it sets."""
        return self._decide(table, (ConflictType.UPDATE_EXISTS, ConflictType.MULTIPLE_UNIQUE_CONFLICTS))

    def _decide(self, table: Table, types: tuple[ConflictType, ...]) -> bool:
        return any(not _is_default(self.rule(table, what).policy, what) for what in types)

    @property
    def functions(self) -> set[str]:
        """The names of all functions that are to be called."""
        return {rule.function for rule in self._rules.values() if rule.function is not None}

    @property
    def needs_commit_times(self) -> str | None:
        """Return the entry that needs the target's track_commit_timestamp, as it was written; None if there is none."""
        for (_, what), rule in self._rules.items():
            if rule.policy is Policy.LAST_UPDATE_WINS:
                return rule.policy
            if what in _DIFFERS and rule.policy is not Policy.ADD_DELTA:
                return what
        return None


def _reaches(policy: Policy, what: ConflictType, several_rows: bool) -> bool:
    """Return True if a policy without a type of conflict applies to this one."""
    if several_rows:
        return policy not in (Policy.APPLY_REMOTE, Policy.LAST_UPDATE_WINS)
    return policy is not Policy.LAST_UPDATE_WINS or what not in _MISSING


def _is_default(policy: Policy, what: ConflictType) -> bool:
    return policy is Policy.DEFAULT or (policy is Policy.ERROR and what in _UNIQUE)


def decide(policy: Policy, conflict: Conflict, commit_time: int, our_origin: str) -> PolicyOutcome:
    """Resolve a conflict by a policy other than CALL.

    Args:
        policy: the policy of the rule for this conflict.
        conflict: the change and the rows of the target.
        commit_time: commit time on the publisher, in microseconds since 2000-01-01 UTC.
        our_origin: name of the worker's replication origin. Its rows are always older than the change: both were
            received through the same stream.
    """
    match policy:
        case Policy.ERROR:
            return PolicyOutcome.ERROR
        case Policy.SKIP | Policy.KEEP_LOCAL:
            return PolicyOutcome.KEEP
        case Policy.APPLY_REMOTE:
            return PolicyOutcome.APPLY
        case Policy.LAST_UPDATE_WINS if conflict.type not in _MISSING:
            won = all(_is_later(conflict, row, commit_time, our_origin) for row in conflict.local_rows)
            if conflict.deleted is not None:
                won = is_later_than_deletion(conflict.deleted, commit_time)
            return PolicyOutcome.APPLY if won else PolicyOutcome.KEEP
        case _ if conflict.type in _UNIQUE:
            return PolicyOutcome.ERROR
        case _:
            return PolicyOutcome.KEEP if conflict.type in _ABSENT else PolicyOutcome.APPLY


def is_later_than_deletion(deleted: RowWriter, commit_time: int) -> bool:
    """Return True if a change is later than the deletion of its row. In the same microsecond the deletion wins."""
    return deleted.committed is None or commit_time > deleted.committed


def _is_later(conflict: Conflict, row: LocalRow, commit_time: int, our_origin: str) -> bool:
    """Return True if the change is later than a row of the target.

    In the same microsecond a delete wins, and of two rows the one whose values are greater as text, column by
    column in the order of their names: so the other side, which sees the two the other way round, decides alike.
    """
    writer = row.writer
    if writer.committed is None or is_ours(writer.origin, our_origin):
        return True  # committed too long ago for the target to know when; or by ourselves
    if writer.committed != commit_time or conflict.remote is None:
        return commit_time >= writer.committed
    remote = conflict.remote
    names = sorted(name for name in remote if name in row.values)
    # Equal rows are not written again: two servers without origin = none would send them to each other for ever.
    return _sorting(remote, names) > _sorting(row.values, names)


def _sorting(row: Mapping[str, str | None], names: list[str]) -> list[tuple[bool, str]]:
    return [(row[name] is not None, row[name] or "") for name in names]


# --- reading ----------------------------------------------------------------------------------------

_TOKEN = re.compile(r'\s*(?:"((?:[^"]|"")+)"|([^\W\d][\w$]*)|([.,:*()]))')
_NAMES = ", ".join(f'"{policy}"' for policy in Policy if policy not in (Policy.CALL, Policy.ADD_DELTA))
_TYPES = tuple(ConflictType)
_SYMBOLS = tuple((symbol, False) for symbol in ".,:*()")


@dataclass(frozen=True, slots=True)
class _Entry:
    table: Table | None
    type: ConflictType | None
    columns: tuple[str, ...]  # of add_delta; else empty
    rule: Rule


def parse_policies(text: str) -> Policies:
    """Read the option's value; empty means none. Raises StatementError (22023)."""
    reader = _Reader(text)
    rules: dict[tuple[Table | None, ConflictType | None], Rule] = {}
    delta_columns: dict[Table, tuple[str, ...]] = {}
    for entry in reader.entries():
        key = entry.table, entry.type
        if (entry.table in delta_columns) if entry.columns else (key in rules):
            raise reader.wrong("Two entries are about the same.")
        if entry.columns and entry.table is not None:
            delta_columns[entry.table] = entry.columns
        else:
            rules[key] = entry.rule
    for table in delta_columns:
        if (table, ConflictType.UPDATE_ORIGIN_DIFFERS) in rules:
            raise reader.wrong(f"Table {'.'.join(table)} has add_delta and another policy for update_origin_differs.")
    return Policies(rules, delta_columns)


class _Reader:
    """Tokens are (text, quoted); a symbol is never quoted."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._cut())
        self._at = 0

    def _cut(self) -> Iterator[tuple[str, bool]]:
        at, end = 0, len(self._text.rstrip())
        while at < end:
            token = _TOKEN.match(self._text, at)
            if token is None:
                raise self.wrong(f"It cannot be read at character {at + 1}.")
            at = token.end()
            quoted, word, symbol = token.groups()
            yield (quoted.replace('""', '"'), True) if quoted else (word or symbol, False)

    def wrong(self, detail: str) -> StatementError:
        return StatementError(
            f'invalid value for parameter "conflict_policy": "{self._text}"',
            detail=detail,
            hint=f'Write [schema.table] [conflict_type]: policy, separated by commas; policies are {_NAMES} and "call"'
            " with the name of a function. For numeric columns, write schema.table(column, ...): add_delta.",
            sqlstate=INVALID_PARAMETER_VALUE,
        )

    def _accept(self, symbol: str) -> bool:
        if self._at < len(self._tokens) and self._tokens[self._at] == (symbol, False):
            self._at += 1
            return True
        return False

    def _name(self, what: str, *, as_written: bool = False) -> tuple[str, bool]:
        if self._at >= len(self._tokens) or self._tokens[self._at] in _SYMBOLS:
            raise self.wrong(f"{what} is missing.")
        name, quoted = self._tokens[self._at]
        self._at += 1
        return (name if quoted or as_written else name.lower()), quoted

    def entries(self) -> Iterator[_Entry]:
        while self._at < len(self._tokens):
            yield self._entry()
            if self._at < len(self._tokens) and not (self._accept(",") and self._at < len(self._tokens)):
                raise self.wrong("A comma or an entry is missing.")

    def _entry(self) -> _Entry:
        start = self._at
        table: Table | None = None
        what: ConflictType | None = None
        if not self._accept("*"):
            first, quoted = self._name("A policy")
            if self._accept("."):
                table = first, self._name("The name of a table")[0]
                if self._accept("("):
                    return self._delta(table)
            elif self._accept(":"):
                return _Entry(None, self._type(first, quoted), (), self._rule())
            else:
                self._at = start
                return _Entry(None, None, (), self._rule())
        if not self._accept(":"):
            what = self._type(*self._name("A colon"))
            if not self._accept(":"):
                raise self.wrong("A colon is missing.")
        return _Entry(table, what, (), self._rule())

    def _delta(self, table: Table) -> _Entry:
        """Read the rest of an entry about columns."""
        columns = [self._name("The name of a column")[0]]
        while self._accept(","):
            columns.append(self._name("The name of a column")[0])
        if not self._accept(")"):
            raise self.wrong("A closing parenthesis is missing.")
        if len(set(columns)) < len(columns):
            raise self.wrong("A column is named twice.")
        if not self._accept(":"):
            raise self.wrong("A colon is missing.")
        if self._name("A policy") != (Policy.ADD_DELTA.value, False):
            raise self.wrong("The only policy for columns is add_delta.")
        return _Entry(table, None, tuple(columns), _ADD_DELTA)

    def _type(self, name: str, quoted: bool) -> ConflictType:
        if quoted or name not in _TYPES:
            types = ", ".join(_TYPES)
            raise self.wrong(
                f'"{name}" is no type of conflict (they are {types}), and a table is named with its schema.'
            )
        return ConflictType(name)

    def _rule(self) -> Rule:
        name, quoted = self._name("A policy")
        if quoted or name not in list(Policy):
            raise self.wrong(f'There is no policy "{name}".')
        policy = Policy(name)
        if policy is Policy.ADD_DELTA:
            raise self.wrong("The policy add_delta names its columns: schema.table(column, ...): add_delta.")
        if policy is not Policy.CALL:
            return Rule(policy)
        return Rule(policy, self._name("The name of a function", as_written=True)[0])
