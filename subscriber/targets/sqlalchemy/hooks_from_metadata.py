"""Hooks from a program's SQLAlchemy tables: which published table each takes its rows from, and which columns.

Table("people", metadata,
      Column("id", Integer, primary_key=True),
      Column("full_name", Text, info={"source": "name"}),
      Column("email", Text, info={"mask": fake_email}),
      Column("seen", DateTime, info={"source": None}),      # only here
      schema="staging", info={"source": "public.person"})
"""

from __future__ import annotations

from sqlalchemy import MetaData, Table

from subscriber.apply.hooks.config import Hook, Hooks, Name, table_name
from subscriber.errors import HookError


def hooks_from(metadata: MetaData) -> Hooks:
    """The hooks of all tables of `metadata` whose `info` has a "source"; the others are left alone.

    Of a table, `info` may also have the functions "where" and "row" of a Hook. Of a column it may have "source", the
    name on the publisher (None: the column is not published), and "mask". Published columns that the table
    does not name are dropped. Raises HookError if two tables have one source.
    """
    table_hooks: dict[str | Name, Hook] = {}
    for table in metadata.tables.values():
        if "source" not in table.info:
            continue
        source = table_name(table.info["source"], "public")
        if source in table_hooks:
            raise HookError(f'two tables of the MetaData have the source "{".".join(source)}"')
        table_hooks[source] = _hook(table)
    return Hooks(table_hooks)


def _hook(table: Table) -> Hook:
    sources = {column.name: column.info.get("source", column.name) for column in table.columns}
    return Hook(
        to=(table.schema or "public", table.name),
        rename={source: name for name, source in sources.items() if source is not None and source != name},
        keep=[source for source in sources.values() if source is not None],
        mask={sources[c.name]: c.info["mask"] for c in table.columns if "mask" in c.info},
        where=table.info.get("where"),
        row=table.info.get("row"),
    )
