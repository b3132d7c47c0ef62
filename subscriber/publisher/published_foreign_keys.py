"""The foreign keys of a table, as the catalog of a server has them.

No text of the publisher is executed: a foreign key consists of quoted names and of known words.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from subscriber import server_features as features
from subscriber.connection.session import Session
from subscriber.publisher.answers import parsing
from subscriber.quoting import identifier, literal, qualified

# Foreign keys of partitions belong to their partitioned table. Those with PERIOD, and those that are not enforced, are
# not copied.
_FOREIGN_KEYS = """
SELECT k.conname::text, n2.nspname::text, c2.relname::text, {columns}, {referenced}, {set_columns},
       k.confmatchtype::text, k.confupdtype::text, k.confdeltype::text,
       k.condeferrable::text, k.condeferred::text, k.convalidated::text
  FROM pg_catalog.pg_constraint k
  JOIN pg_catalog.pg_class c ON c.oid = k.conrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_catalog.pg_class c2 ON c2.oid = k.confrelid JOIN pg_catalog.pg_namespace n2 ON n2.oid = c2.relnamespace
 WHERE n.nspname = {schema} AND c.relname = {name} AND c.relkind = 'r' AND k.contype = 'f'{plain}
 ORDER BY k.conname
"""
_NAMES = """
pg_catalog.array_to_json(ARRAY(
  SELECT a.attname::text FROM pg_catalog.unnest(k.{numbers}) WITH ORDINALITY AS u (number, place)
    JOIN pg_catalog.pg_attribute a ON a.attrelid = k.{relid} AND a.attnum = u.number ORDER BY u.place))::text"""
_ACTIONS = {"a": "", "r": "RESTRICT", "c": "CASCADE", "n": "SET NULL", "d": "SET DEFAULT"}
_MATCHES = {"s": "", "f": "MATCH FULL"}
_BOOLEANS = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class PublishedForeignKey:
    """A foreign key of a table.

    Attributes:
        name: its name.
        columns: the columns that reference others.
        schema: the schema of the referenced table.
        table: the name of the referenced table.
        referenced: the referenced columns.
        match: MATCH FULL, or empty.
        on_update: the action, or empty.
        on_delete: the action, or empty.
        set_columns: the columns that the action of a DELETE sets. Empty: all.
        deferral: the words about checks at the end of a transaction, or empty.
        is_validated: it holds for all rows.
    """

    name: str
    columns: tuple[str, ...]
    schema: str
    table: str
    referenced: tuple[str, ...]
    match: str
    on_update: str
    on_delete: str
    set_columns: tuple[str, ...]
    deferral: str
    is_validated: bool

    def is_same(self, other: PublishedForeignKey) -> bool:
        """Return True if `other` is the same foreign key, apart from its name and its validation."""
        return replace(self, name="", is_validated=True) == replace(other, name="", is_validated=True)

    def add(self, schema: str, table: str) -> str:
        """Return the statement that adds the foreign key to a table, and checks no row that exists."""
        actions = f" ON UPDATE {self.on_update}" * bool(self.on_update)
        if self.on_delete:
            actions += f" ON DELETE {self.on_delete}"
            actions += f" ({_list(self.set_columns)})" * bool(self.set_columns)
        return (
            f"ALTER TABLE {qualified(schema, table)} ADD CONSTRAINT {identifier(self.name)}"
            f" FOREIGN KEY ({_list(self.columns)}) REFERENCES {qualified(self.schema, self.table)}"
            f" ({_list(self.referenced)}){' ' * bool(self.match)}{self.match}{actions}"
            f"{' ' * bool(self.deferral)}{self.deferral} NOT VALID"
        )

    def validate(self, schema: str, table: str) -> str:
        """Return the statement that checks all rows of a table that has the foreign key."""
        return f"ALTER TABLE {qualified(schema, table)} VALIDATE CONSTRAINT {identifier(self.name)}"


def _list(names: Sequence[str]) -> str:
    return ", ".join(map(identifier, names))


def foreign_keys_query(schema: str, name: str, version: int) -> str:
    """Return the query for the foreign keys of a table, whose rows parse_foreign_keys() reads.

    Args:
        schema: the schema of the table.
        name: the name of the table.
        version: the version of the server, such as 180006.
    """
    set_columns = _NAMES.format(numbers="confdelsetcols", relid="conrelid")
    return _FOREIGN_KEYS.format(
        columns=_NAMES.format(numbers="conkey", relid="conrelid"),
        referenced=_NAMES.format(numbers="confkey", relid="confrelid"),
        set_columns=set_columns if features.FOREIGN_KEY_SET_COLUMNS.is_in(version) else "'[]'",
        schema=literal(schema),
        name=literal(name),
        plain=" AND k.conparentid = 0" * features.INHERITED_FOREIGN_KEYS.is_in(version)
        + " AND NOT k.conperiod AND k.conenforced" * features.TEMPORAL_FOREIGN_KEYS.is_in(version),
    )


def parse_foreign_keys(rows: Iterable[Sequence[str | None]]) -> list[PublishedForeignKey]:
    """Return the foreign keys of the rows of foreign_keys_query().

    Raises:
        ProtocolError: a row is not as a server prints it.
    """
    keys = []
    with parsing("foreign keys"):
        for row in rows:
            texts = [text or "" for text in row]
            name, schema, table, columns, referenced, set_columns, match, update, delete, *flags = texts
            deferrable, deferred, validated = (_BOOLEANS[flag] for flag in flags)
            keys.append(
                PublishedForeignKey(
                    name,
                    _names(columns),
                    schema,
                    table,
                    _names(referenced),
                    _MATCHES[match],
                    _ACTIONS[update],
                    _ACTIONS[delete],
                    _names(set_columns),
                    "DEFERRABLE" * deferrable + " INITIALLY DEFERRED" * deferred,
                    validated,
                )
            )
    return keys


def _names(text: str) -> tuple[str, ...]:
    names = json.loads(text)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("no list of names")
    return tuple(names)


async def published_foreign_keys(source: Session, schema: str, name: str) -> list[PublishedForeignKey]:
    """Return the foreign keys of a table of the publisher.

    Args:
        source: a session with standard_conforming_strings.
        schema: the schema of the table.
        name: the name of the table.

    Raises:
        ServerError: the publisher refuses the query.
        ProtocolError: its answer cannot be read.
    """
    return parse_foreign_keys(await source.rows(foreign_keys_query(schema, name, source.server_version)))
