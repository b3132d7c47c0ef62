"""One table of a database that SQLAlchemy speaks to: its statements, and values from what the publisher writes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sqlalchemy import ColumnElement, Table, bindparam, delete, insert, tuple_, update
from sqlalchemy.dialects import mysql, sqlite
from sqlalchemy.sql.expression import UpdateBase

from subscriber.apply.hooks.config import Name
from subscriber.errors import ApplyError, MappingError
from subscriber.sqlstate import DATA_EXCEPTION
from subscriber.targets.sqlalchemy.dialects.mysql import MYSQL
from subscriber.targets.sqlalchemy.types import Read, reader

Texts = Mapping[str, str | None]  # a row as the publisher writes it
Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class SourceColumn:
    """A published column; the type is the publisher's."""

    name: str
    type_oid: int
    type_modifier: int


@dataclass(frozen=True, slots=True)
class SourceTable:
    """A published table, and its image on the target: the columns, the key, and the name `to`."""

    schema: str
    name: str
    columns: tuple[SourceColumn, ...]
    key: tuple[str, ...]
    to: Name

    @property
    def label(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def target(self) -> str:
        return flat(self.to)


def flat(name: Name) -> str:
    """Return the name of a table in a database without schemas."""
    schema, table = name
    return table if schema == "public" else f"{schema}_{table}"


class TargetTable:
    """A table of the target, and how texts become its values."""

    def __init__(self, label: str, table: Table, key: tuple[str, ...], dialect: str) -> None:
        self.label = label
        self.table = table
        self.key = key
        self._readers: dict[str, Read] = {}
        for column in table.columns:
            read = reader(column, dialect)
            if read is not None:
                self._readers[column.name] = read
        self._dialect = dialect
        self._upserts: dict[tuple[str, ...], list[UpdateBase]] = {}

    @cached_property
    def delete(self) -> UpdateBase:
        """DELETE of a row."""
        return delete(self.table).where(*self._where())

    @cached_property
    def delete_all(self) -> UpdateBase | None:
        """Return a DELETE of many rows by `keys`, or None where executemany() does that.

        Drivers for MySQL combine only inserts, and would wait for the result of each other statement.
        """
        if self._dialect not in MYSQL:
            return None
        columns = [self.table.columns[name] for name in self.key]
        key: ColumnElement[Any] = columns[0] if len(columns) == 1 else tuple_(*columns)
        return delete(self.table).where(key.in_(bindparam("keys", expanding=True)))

    def keys(self, rows: Collection[Texts]) -> list[Any]:
        """Return the parameter of delete_all: the keys of rows."""
        keys = [tuple(self.values({name: texts[name] for name in self.key}).values()) for texts in rows]
        return keys if len(self.key) > 1 else [key for (key,) in keys]

    def require(self, columns: Sequence[str]) -> None:
        """Raises MappingError unless the table has these columns, of types that values can be made for, and the key."""
        if missing := [name for name in columns if name not in self.table.columns]:
            raise MappingError(
                f'table "{self.table.name}" of the target is missing replicated columns: {", ".join(missing)}',
                hint="Add them there, and start the mirror again.",
            )
        if unfit := [name for name in columns if name not in self._readers]:
            column = self.table.columns[unfit[0]]
            raise MappingError(
                f'no values can be made for column "{column.name}" of table "{self.table.name}"',
                detail=f"Its type is {column.type!r}.",
                hint="Make it a text column: it takes what PostgreSQL writes.",
            )
        if {column.name for column in self.table.primary_key} != set(self.key):
            raise MappingError(
                f'the primary key of table "{self.table.name}" is not the one of "{self.label}": {", ".join(self.key)}'
            )

    def values(self, texts: Texts) -> dict[str, Any]:
        """The values of a row. Raises ApplyError for one that the target's type has not."""
        values: dict[str, Any] = {}
        for name, text in texts.items():
            try:
                values[name] = None if text is None else self._readers[name](text)
            except (ValueError, ArithmeticError, LookupError):
                raise ApplyError(
                    f'a value of column "{name}" of "{self.label}" cannot be kept',
                    detail=f"The column's type on the target is {self.table.columns[name].type!r}.",
                    hint="Make it a text column there: it takes what PostgreSQL writes.",
                    sqlstate=DATA_EXCEPTION,
                ) from None  # whose text may have the value
        return values

    def key_of(self, texts: Texts) -> Key:
        return tuple([texts[name] for name in self.key])

    def key_parameters(self, texts: Texts) -> dict[str, Any]:
        """Return the parameters of the statements that search for a row."""
        key = self.values({name: texts[name] for name in self.key})
        return {f"key_{name}": value for name, value in key.items()}

    def update(self, columns: Collection[str]) -> UpdateBase:
        """UPDATE of some columns."""
        values: dict[str, Any] = {name: bindparam(f"new_{name}") for name in columns}
        return update(self.table).where(*self._where()).values(values)

    def upsert(self, columns: tuple[str, ...]) -> list[UpdateBase]:
        """Return the statements that insert rows with these columns, or update existing ones."""
        if columns not in self._upserts:
            self._upserts[columns] = self._upsert([name for name in columns if name not in self.key])
        return self._upserts[columns]

    def _upsert(self, others: list[str]) -> list[UpdateBase]:
        if self._dialect in MYSQL:
            into = mysql.insert(self.table)
            return [into.on_duplicate_key_update({name: into.inserted[name] for name in others or self.key})]
        if self._dialect == "sqlite":
            row = sqlite.insert(self.table)
            return [
                row.on_conflict_do_update(
                    index_elements=self.key, set_={n: row.excluded[n] for n in others or self.key}
                )
            ]
        return [self.delete, insert(self.table)]

    def _where(self) -> list[ColumnElement[bool]]:
        return [self.table.columns[name] == bindparam(f"key_{name}") for name in self.key]
