"""Configuration of hooks: how an embedding program changes rows on their way to the target. See table_hook.py.

    where      decides by the columns of the replica identity whether the target has the row at all
    row        returns the row for the target
    mask       replaces single values
    drop       leaves columns out
    rename     is applied last: all others use the publisher's column names

A row is a dict of texts as the publisher's types write them, None for NULL. In the new row of an UPDATE a large value
that was not touched is UNCHANGED, unless the publisher sends whole rows (REPLICA IDENTITY FULL), which have it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

TextRow = dict[str, Any]  # by column: str, None for NULL, or UNCHANGED
Name = tuple[str, str]  # schema, table


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """Changes to the rows of one published table. Columns have the publisher's names.

    to       the table on the target, "name" in the same schema or "schema.name"; None: the same
    rename   column -> its name on the target
    drop     columns that the target does not get
    keep     the only columns that the target gets; None: all
    mask     column -> a text (None: NULL) that stands for every value, or a function of the text. The function is
             not called for NULL
    where    a function of the row, or of its replica identity: False leaves the row out
    row      a function of the row that returns the row for the target; None leaves it out

    Functions may be async. They must return the same result for the same row each time, because rows are sent again
    after a crash. An exception stops the subscription. Returned values that are not text are converted with str().
    """

    to: str | Name | None = None
    rename: Mapping[str, str] = field(default_factory=dict)
    drop: Collection[str] = ()
    keep: Collection[str] | None = None
    mask: Mapping[str, str | Callable[[str], Any] | None] = field(default_factory=dict)
    where: Callable[[TextRow], bool | Awaitable[bool]] | None = None
    row: Callable[[TextRow], TextRow | Awaitable[TextRow | None] | None] | None = None

    @property
    def reads_values(self) -> bool:
        """True if the hook changes more than names."""
        return bool(self.mask) or self.where is not None or self.row is not None


class Hooks:
    """The hooks of one subscription: by published table, "name" in schema public or "schema.name".

    `schemas` renames whole schemas: published schema -> schema on the target.
    """

    def __init__(
        self, tables: Mapping[str | Name, Hook] | None = None, *, schemas: Mapping[str, str] | None = None
    ) -> None:
        self.tables = {table_name(name, "public"): hook for name, hook in (tables or {}).items()}
        self.schemas = dict(schemas or {})

    def find(self, schema: str, name: str) -> Hook | None:
        """Return the hook of a published table. None: it has none."""
        return self.tables.get((schema, name)) or (Hook() if schema in self.schemas else None)

    def target(self, schema: str, name: str) -> Name:
        """The table on the target for a published one."""
        hook = self.tables.get((schema, name))
        schema = self.schemas.get(schema, schema)
        return (schema, name) if hook is None or hook.to is None else table_name(hook.to, schema)


def table_name(name: str | Name, schema: str) -> Name:
    """(schema, name) of a table that is named "name" or "schema.name"."""
    if not isinstance(name, str):
        return name
    first, dot, second = name.partition(".")
    return (first, second) if dot else (schema, first)
