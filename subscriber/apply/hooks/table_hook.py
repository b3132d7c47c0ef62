"""The hook of one table (config.py), done to its rows.

A hook must treat all changes of a row in the same way. A row is found on the target by the key that it has on the
publisher, so keys are neither masked nor dropped, and no function changes them. Whether the target has a row must be
known from the old row that an UPDATE or DELETE contains: `where` receives the columns of the replica identity only,
and a function may leave rows out only under REPLICA IDENTITY FULL. An UPDATE
after which a row passes that did not pass before is an INSERT here, one after which it does not is a DELETE. Tables
that can have neither, because nothing identifies their rows, are exempt.

Source: pgoutput_row_filter() in pgoutput.c; rowfilter_column_walker() in publicationcmds.c for the columns that a
filter may use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from inspect import isawaitable
from traceback import extract_tb
from typing import Any

from subscriber.apply.hooks.config import Hook, Hooks, Name, TextRow
from subscriber.apply.relation_map import RelationMapping
from subscriber.apply.sentinels import UNCHANGED, Missing
from subscriber.display import sql_name
from subscriber.errors import HookError
from subscriber.protocol import tuple_data
from subscriber.protocol.encodings import UTF8, decode, encode
from subscriber.protocol.messages import Delete, Insert, OldPart, Relation, ReplicaIdentity, Update
from subscriber.protocol.tuple_data import BINARY, NULL, TEXT, TupleData
from subscriber.sqlstate import EXTERNAL_ROUTINE_EXCEPTION, FEATURE_NOT_SUPPORTED

Row = tuple[bytes, list[bytes | None]]  # what TupleData.split() gives
Change = Insert | Update | Delete


def bind(hooks: Hooks, remote: Relation, codec: str = UTF8) -> TableHook | None:
    """The hook of a table as its RELATION message describes it; None: it has none.

    `codec` is that of its values (protocol/encodings.py). Raises HookError if they do not fit.
    """
    hook = hooks.find(remote.schema, remote.name)
    return None if hook is None else TableHook(hook, hooks.target(remote.schema, remote.name), remote, codec)


class TableHook:
    """The hook of one table, applied to its rows. `relation` is what the target gets, `table` where.

    `sources` are the publisher's columns by the names of the target's, `names` the other way.
    """

    def __init__(self, hook: Hook, table: Name, remote: Relation, codec: str) -> None:
        self._hook = hook
        self._codec = codec
        self._label = f"{remote.schema}.{remote.name}"
        self._quoted = sql_name(remote.schema, remote.name)
        self._names = [column.name for column in remote.columns]
        self._mask = [(self._names.index(name), mask) for name, mask in hook.mask.items() if name in self._names]
        self._whole = remote.replica_identity is ReplicaIdentity.FULL
        keys = set() if self._whole else {column.name for column in remote.columns if column.is_key}
        self._visible = keys or set(self._names)
        self._may_leave_out = not keys
        self._protected: list[int] = []
        self._require_known(hook)
        dropped = set(self._names) - set(hook.keep if hook.keep is not None else self._names) | set(hook.drop)
        self._require_keys(keys, dropped, "It is part of the table's replica identity.")
        self._protect(keys)
        self.kept = tuple(i for i, name in enumerate(self._names) if name not in dropped)
        columns = tuple(
            replace(remote.columns[i], name=hook.rename.get(self._names[i], self._names[i])) for i in self.kept
        )
        self._require_distinct([column.name for column in columns])
        self.sources = {column.name: self._names[i] for i, column in zip(self.kept, columns, strict=True)}
        self.names = {source: name for name, source in self.sources.items()}
        self.relation = replace(remote, namespace=table[0], name=table[1], columns=columns)
        self._cuts = len(self.kept) < len(self._names)

    @property
    def reads_values(self) -> bool:
        """True if the hook changes more than names."""
        return self._hook.reads_values

    # --- whether hook and tables fit ------------------------------------------------------------

    def fit(self, mapping: RelationMapping) -> None:
        """The mapping made of `relation`. Raises HookError if rows could not be found with it."""
        if self._whole:  # any column may be asked for, so those count by which the target knows a row
            self.found_by([self.sources[name] for name in mapping.local.identity if name in self.sources])

    def found_by(self, columns: Collection[str]) -> None:
        """`columns` of the publisher are those by which the target knows a row. Raises HookError if that cannot be."""
        self._require_keys(set(columns), set(self._names) - set(self.names), "Rows are found by it on the target.")
        self._protect(set(columns))

    def _require_known(self, hook: Hook) -> None:
        named = {*hook.rename, *hook.drop, *(hook.keep or ()), *hook.mask}
        if unknown := sorted(named - set(self._names)):
            raise HookError(
                f'hook of table "{self._label}" names columns that are not published: {_quoted(unknown)}',
                detail=f"Published are {_quoted(self._names)}.",
            )

    def _require_keys(self, keys: set[str], dropped: set[str], why: str) -> None:
        for what, names in (("masks", set(self._hook.mask)), ("drops", dropped)):
            if lost := sorted(keys & names):
                raise HookError(
                    f'hook of table "{self._label}" {what} key column {_quoted(lost[:1])}',
                    detail=why,
                    hint="Mask or drop other columns, or give the table another replica identity on the publisher.",
                )

    def _require_distinct(self, names: list[str]) -> None:
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise HookError(f'hook of table "{self._label}" gives two columns the name {_quoted(twice[:1])}')

    def _protect(self, names: set[str]) -> None:
        self._protected = [i for i, name in enumerate(self._names) if name in names]

    # --- rows -----------------------------------------------------------------------------------

    async def change(self, change: Change) -> Change | None:
        """Return the change for the target. None: there is none."""
        if not self._hook.reads_values:
            return self._cut_change(change) if self._cuts else change
        match change:
            case Insert():
                row = await self._whole_row(change.new.split())
                return None if row is None else Insert(change.xid, change.relid, self._cut(row))
            case Update():
                return await self._update(change)
            case Delete():
                return await self._delete(change)

    async def copied(self, row: Row) -> list[bytes | None] | None:
        """A row of the initial copy, as the values that the target gets; None leaves it out."""
        whole = await self._whole_row(row)
        return None if whole is None else [whole[1][i] for i in self.kept]

    async def _update(self, change: Update) -> Change | None:
        new = change.new.split()
        old = change.old.split() if change.old is not None else None
        whole = old is not None and change.old_part is OldPart.ROW
        if old is not None and whole:
            new = _filled(new, old)
        before = old if old is not None else new
        row = await self._whole_row(new)
        was: Row | None
        if whole:
            was = await self._whole_row(before)
        else:
            was = before if await self._passes(before) else None
        if row is not None and was is not None:
            changed = None if old is None else self._cut(was)
            return Update(change.xid, change.relid, change.old_part, changed, self._cut(row))
        if row is not None:
            if tuple_data.UNCHANGED in row[0]:
                raise HookError(
                    f'a row of table "{self._label}" passes the hook\'s filter that did not pass before, '
                    "and was not sent as a whole",
                    detail="A large value that was not changed is not sent.",
                    hint=f"On the publisher: ALTER TABLE {self._quoted} REPLICA IDENTITY FULL",
                )
            return Insert(change.xid, change.relid, self._cut(row))
        if was is not None:
            part = change.old_part or OldPart.KEY
            return Delete(change.xid, change.relid, part, self._cut(was if old is not None else self._key(was)))
        return None

    async def _delete(self, change: Delete) -> Delete | None:
        old = change.old.split()
        if change.old_part is OldPart.ROW:
            wanted = await self._whole_row(old)
        else:
            wanted = old if await self._passes(old) else None
        return None if wanted is None else Delete(change.xid, change.relid, change.old_part, self._cut(wanted))

    async def _whole_row(self, row: Row) -> Row | None:
        """Return the row for the target, from a row that was sent whole except for unchanged values."""
        if not await self._passes(row):
            return None
        if self._hook.row is not None:
            rewritten = await self._rewritten(row)
            if rewritten is None:
                return None
            row = rewritten
        return await self._masked(row) if self._mask else row

    async def _passes(self, row: Row) -> bool:
        """Return True if the target has the row. It may have only the columns of the key."""
        where = self._hook.where
        if where is None:
            return True
        visible = _Visible(self._texts(row, self._visible))
        visible.hidden = set(self._names) - self._visible
        return bool(await self._call("where", where, visible))

    async def _rewritten(self, row: Row) -> Row | None:
        assert self._hook.row is not None
        given = self._texts(row, set(self._names))
        answer = await self._call("row", self._hook.row, dict(given))
        if answer is None:
            if not self._may_leave_out:
                raise HookError(
                    f'hook of table "{self._label}" leaves out a row',
                    detail="Whether the target has a row must be known from what a later change brings of it.",
                    hint=f"On the publisher: ALTER TABLE {self._quoted} REPLICA IDENTITY FULL; or decide in where,"
                    " by the columns of the replica identity.",
                )
            return None
        if not isinstance(answer, Mapping) or answer.keys() != given.keys():
            raise HookError(
                f'hook of table "{self._label}" gave something else than a row',
                detail=f"A row has the columns {_quoted(self._names)}.",
            )
        status, values = bytearray(row[0]), list(row[1])
        for i, name in enumerate(self._names):
            if (value := answer[name]) is given[name]:
                continue
            values[i] = self._given(i, value)
            status[i] = NULL if values[i] is None else TEXT
        if any(status[i] != row[0][i] or values[i] != row[1][i] for i in self._protected):
            raise HookError(f'hook of table "{self._label}" changes the key of a row', detail="Rows are found by it.")
        return bytes(status), values

    async def _masked(self, row: Row) -> Row:
        status, values = bytearray(row[0]), list(row[1])
        for i, mask in self._mask:
            if status[i] == tuple_data.UNCHANGED:  # and what the target has is masked already
                continue
            if callable(mask):
                value = values[i]
                if value is not None:
                    self._require_text(status[i])
                    values[i] = self._given(i, await self._call("mask", mask, decode(value, self._codec)))
            else:
                values[i] = as_text(mask, self._codec)
            status[i] = NULL if values[i] is None else TEXT
        return bytes(status), values

    # --- values ---------------------------------------------------------------------------------

    def _texts(self, row: Row, names: set[str]) -> TextRow:
        texts: TextRow = {}
        for name, status, value in zip(self._names, *row, strict=True):
            if name in names:
                self._require_text(status)
                texts[name] = (
                    UNCHANGED
                    if status == tuple_data.UNCHANGED
                    else None
                    if value is None
                    else decode(value, self._codec)
                )
        return texts

    def _require_text(self, status: int) -> None:
        if status == BINARY:
            raise needs_text(self._label)

    def _given(self, i: int, value: object) -> bytes | None:
        """Return the value that a function has returned for a column."""
        if isinstance(value, Missing):
            raise HookError(f'hook of table "{self._label}" gave no value for column "{self._names[i]}"')
        return as_text(value, self._codec)

    async def _call(self, what: str, function: Callable[[Any], Any], given: TextRow | str) -> Any:
        try:
            answer = function(given)
            return await answer if isawaitable(answer) else answer
        except _HiddenError as hidden:
            raise HookError(
                f'where of the hook of table "{self._label}" reads column "{hidden.args[0]}"',
                detail="It is not part of the replica identity, so it is not known of a row that goes.",
                hint=f"On the publisher: ALTER TABLE {self._quoted} REPLICA IDENTITY FULL",
            ) from None
        except Exception as error:
            raise self._failed(what, error) from error

    def _failed(self, what: str, error: Exception) -> HookError:
        frame = extract_tb(error.__traceback__)[-1]
        return HookError(
            f'{what} of the hook of table "{self._label}" raised {type(error).__name__}',  # whose text may have values
            detail=f"In {frame.name}(), line {frame.lineno} of {frame.filename.rpartition('/')[2]}.",
            sqlstate=EXTERNAL_ROUTINE_EXCEPTION,
        )

    def _cut(self, row: Row) -> TupleData:
        status, values = row
        if self._cuts:
            status, values = bytes(status[i] for i in self.kept), [values[i] for i in self.kept]
        return TupleData.join(status, values)

    def _cut_change(self, change: Change) -> Change:
        match change:
            case Insert():
                return replace(change, new=self._cut(change.new.split()))
            case Update():
                old = None if change.old is None else self._cut(change.old.split())
                return replace(change, old=old, new=self._cut(change.new.split()))
            case Delete():
                return replace(change, old=self._cut(change.old.split()))

    def _key(self, row: Row) -> Row:
        """Return a row as if only its key had been sent."""
        status, values = row
        keys = set(self._protected)
        return (
            bytes(kind if i in keys else NULL for i, kind in enumerate(status)),
            [value if i in keys else None for i, value in enumerate(values)],
        )


class _HiddenError(Exception):
    """A function has asked for a column that is not known of every change."""


class _Visible(TextRow):
    """The columns of a row that every change of the row has."""

    hidden: set[str]

    def __missing__(self, name: str) -> Any:
        raise _HiddenError(name) if name in self.hidden else KeyError(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self or name in self.hidden else default


def needs_text(label: str) -> HookError:
    """The error for a hook that reads values which are sent in binary."""
    return HookError(
        f'hook of table "{label}" reads values, which are sent in binary',
        hint="ALTER SUBSCRIPTION … SET (binary = false)",
        sqlstate=FEATURE_NOT_SUPPORTED,
    )


def as_text(value: object, codec: str = UTF8) -> bytes | None:
    """A value that a function gave, as the type's input function reads it; texts are taken as they are."""
    if value is None:
        return None
    text = f"\\x{value.hex()}" if isinstance(value, bytes | bytearray) else str(value)
    return encode(text, codec)


def _filled(new: Row, old: Row) -> Row:
    """The new row with the values of the old one that were not touched, and so not sent again."""
    status, values = bytearray(new[0]), list(new[1])
    for i, kind in enumerate(status):
        if kind == tuple_data.UNCHANGED:
            status[i], values[i] = old[0][i], old[1][i]
    return bytes(status), values


def _quoted(names: Collection[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
