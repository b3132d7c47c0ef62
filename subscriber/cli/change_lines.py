"""Decoded messages as lines, either JSON or text for people. No I/O here.

    {"op": "begin", "xid": 745, "lsn": "0/15E8A90", "time": "2030-01-02T03:04:05.678901+00:00"}
    {"op": "insert", "xid": 745, "table": "public.t", "new": {"id": "1", "note": null}}
    {"op": "update", "xid": 745, "table": "public.t", "key": {"id": "1"}, "new": {"id": "2"}, "unchanged": ["note"]}
    {"op": "delete", "xid": 745, "table": "public.t", "old": {"id": "2", "note": "x"}}
    {"op": "truncate", "xid": 745, "tables": ["public.t"], "cascade": false, "restart_identity": false}
    {"op": "message", "xid": null, "lsn": "0/15E8B00", "transactional": false, "prefix": "p", "content": "text"}
    {"op": "commit", "xid": 745, "lsn": "0/15E8A90", "end_lsn": "0/15E8AC0"}

Values are in the text format of their types. NULL is null. The publisher does not send a large value that did not
change: such a column is missing in `new` and listed in `unchanged`. The previous row is in one of two fields, or
missing:

- `key`: the columns of the replica identity, sent only when one of them changed or the row was deleted.
- `old`: the whole row, sent under REPLICA IDENTITY FULL.

Columns that are not published appear nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from subscriber.display import json_text, printable
from subscriber.errors import ProtocolError
from subscriber.protocol.messages import (
    Begin,
    Commit,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    OldPart,
    Origin,
    Relation,
    Truncate,
    Update,
    moment,
)
from subscriber.protocol.tuple_data import NULL, UNCHANGED, TupleData

Line = dict[str, Any]


def is_change(line: Line) -> bool:
    """Return True if the line counts for --limit."""
    return line["op"] in ("insert", "update", "delete", "truncate", "message")


class ChangeLines:
    """Converts messages to dictionaries in the order in which they arrive. Remembers the columns of every table."""

    def __init__(self) -> None:
        self._relations: dict[int, Relation] = {}
        self._xid: int | None = None

    def line(self, message: Message) -> Line | None:
        """Convert a message to a dictionary.

        Returns:
            None for a message that only describes others (Relation, Type).

        Raises:
            ProtocolError: the message names a table that no Relation message has described.
        """
        match message:
            case Relation():
                self._relations[message.relid] = message
                return None
            case Begin(final_lsn, commit_time, xid):
                self._xid = xid
                time = moment(commit_time).isoformat(timespec="microseconds")
                return {"op": "begin", "xid": xid, "lsn": str(final_lsn), "time": time}
            case Commit(commit_lsn, end_lsn, _):
                xid_of_commit, self._xid = self._xid, None
                return {"op": "commit", "xid": xid_of_commit, "lsn": str(commit_lsn), "end_lsn": str(end_lsn)}
            case Origin(origin_lsn, name):
                return {"op": "origin", "xid": self._xid, "name": name, "lsn": str(origin_lsn)}
            case Insert() | Update() | Delete():
                return self._row(message)
            case Truncate(_, cascade, restart_identity, relids):
                tables = [_name(self._relation(relid)) for relid in relids]
                flags = {"cascade": cascade, "restart_identity": restart_identity}
                return {"op": "truncate", "xid": self._xid, "tables": tables, **flags}
            case LogicalMessage():
                return self._message(message)
            case _:
                return None

    def _relation(self, relid: int) -> Relation:
        if relid not in self._relations:
            raise ProtocolError(f"no relation with OID {relid} has been described")
        return self._relations[relid]

    def _row(self, message: Insert | Update | Delete) -> Line:
        relation = self._relation(message.relid)
        line: Line = {"op": type(message).__name__.lower(), "xid": self._xid, "table": _name(relation)}
        if not isinstance(message, Insert) and message.old is not None:
            whole = message.old_part is OldPart.ROW
            line["old" if whole else "key"] = _values(relation, message.old, keys_only=not whole)[0]
        if not isinstance(message, Delete):
            line["new"], unchanged = _values(relation, message.new)
            if unchanged:
                line["unchanged"] = unchanged
        return line

    def _message(self, message: LogicalMessage) -> Line:
        line = {"op": "message", "xid": self._xid if message.transactional else None, "lsn": str(message.lsn)}
        line |= {"transactional": message.transactional, "prefix": message.prefix}
        try:
            return line | {"content": message.content.decode()}
        except UnicodeDecodeError:
            return line | {"content_hex": message.content.hex()}


def _name(relation: Relation) -> str:
    return f"{relation.schema}.{relation.name}"


def _values(relation: Relation, row: TupleData, *, keys_only: bool = False) -> tuple[dict[str, str | None], list[str]]:
    """Return the values by column name, and the names of the unchanged columns that were not sent."""
    if row.ncols != len(relation.columns):
        raise ProtocolError(f"a row of {_name(relation)} has {row.ncols} columns instead of {len(relation.columns)}")
    values: dict[str, str | None] = {}
    unchanged = []
    for column, status, value in zip(relation.columns, *row.split(), strict=True):
        if keys_only and not column.is_key:
            continue
        if status == UNCHANGED:
            unchanged.append(column.name)
        else:
            values[column.name] = None if status == NULL or value is None else value.decode(errors="replace")
    return values, unchanged


def as_json(line: Line) -> str:
    return json_text(line)


def as_text(line: Line) -> str:
    """Format a line for people: `UPDATE public.t [id='1'] id='2' note=(unchanged)`."""
    return printable(_as_text(line))


def _as_text(line: Line) -> str:
    op = line["op"]
    match op:
        case "begin":
            return f"BEGIN {line['xid']} at {line['lsn']}, committed {line['time']}"
        case "commit":
            return f"COMMIT {line['xid']}, ends at {line['end_lsn']}"
        case "origin":
            return f"ORIGIN {line['name']} {line['lsn']}"
        case "truncate":
            options = " CASCADE" * line["cascade"] + " RESTART IDENTITY" * line["restart_identity"]
            return f"TRUNCATE {', '.join(line['tables'])}{options}"
        case "message":
            content = line["content"] if "content" in line else f"\\x{line['content_hex']}"
            return f"MESSAGE {line['prefix']}: {_quoted(content)}"
    parts = [f"{op.upper()} {line['table']}"]
    parts.extend(f"[{_pairs(line[name], ())}]" for name in ("key", "old") if name in line)
    if "new" in line:
        parts.append(_pairs(line["new"], line.get("unchanged", ())))
    return " ".join(part for part in parts if part)


def _pairs(values: Mapping[str, str | None], unchanged: Sequence[str]) -> str:
    pairs = [f"{name}={'NULL' if value is None else _quoted(value)}" for name, value in values.items()]
    return " ".join([*pairs, *(f"{name}=(unchanged)" for name in unchanged)])


def _quoted(text: str) -> str:
    """Quote a value. Its own backslashes are doubled, because a single one starts an escape of printable()."""
    return "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"
