"""The comparison of two catalogs, and the statements that make the target like the source. Pure.

A statement is given where it is exact: it changes the object to the definition of the source, and nothing else. Where
only pg_dump can write it, or where it would drop something of the target, it is a comment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from subscriber.display import shell_word
from subscriber.migration.diff.catalog import CatalogObject, ObjectKey
from subscriber.quoting import identifier, literal
from subscriber.sql_text import sql_comment, sql_text


@dataclass(frozen=True, slots=True)
class SchemaDifference:
    """An object that is different on the target.

    Attributes:
        kind: of the object, for example column.
        name: quoted as in SQL.
        attribute: the attribute that differs. None: the object exists on one side only.
        source: its value on the source. True or False: the object exists there or not.
        target: the same on the target.
        statements: SQL for the target, see sql_text.py. Text behind `--` is a comment.
    """

    kind: str
    name: str
    attribute: str | None
    source: Any
    target: Any
    statements: tuple[str, ...]

    def describe(self) -> str:
        """Return the difference as a line for people."""
        if self.attribute is None:
            return f"{self.kind} {self.name} is {'missing' if self.source else 'additional'} on the target"
        values = f"{self.source!r} on the source, {self.target!r} on the target"
        return f"{self.kind} {self.name}: {self.attribute} is {values}"


# Kinds that are created again if their definition differs, because PostgreSQL cannot alter it.
_CREATED_AGAIN = frozenset({"constraint", "index", "trigger", "rule", "policy", "statistics", "event trigger"})
_WITH_TABLE = frozenset({"constraint", "trigger", "rule", "policy"})  # whose names are unique within a table only
# Kinds whose absence follows from the absence of their table.
_PARTS = frozenset({"column", "constraint", "index", "trigger", "rule", "policy"})
# Attributes that are set by CREATE, or by the statement of the whole object.
_CREATED_WITH = {("schema", "owner"), ("event trigger", "enabled"), ("event trigger", "owner"), ("column", "acl")}
# The words of kinds in COMMENT ON, ALTER and GRANT, if they are not the kind itself.
_WORDS = {"enum": "TYPE", "range": "TYPE"}
_FUNCTIONS = {"p": "PROCEDURE", "a": "AGGREGATE"}
_PERSISTENT = {True: "LOGGED", False: "UNLOGGED"}
_ENABLED = {"O": "ENABLE", "D": "DISABLE", "R": "ENABLE REPLICA", "A": "ENABLE ALWAYS"}
_STORAGE = {"p": "PLAIN", "e": "EXTERNAL", "m": "MAIN", "x": "EXTENDED"}


def compare(
    source: Mapping[ObjectKey, CatalogObject], target: Mapping[ObjectKey, CatalogObject]
) -> Iterator[SchemaDifference]:
    """Yield the differences, in an order in which most statements can be executed."""
    order = list(dict.fromkeys(key.kind for key in [*source, *target]))
    keys = sorted({*source, *target}, key=lambda key: (order.index(key.kind), key.name))
    for key in keys:
        there, here = source.get(key), target.get(key)
        if there is not None and here is not None:
            yield from _attributes(key, there, here)
        elif there is not None and not _follows(there, key, target):
            create = f"{there.create};" if there.create else _dump(key)
            yield _difference(key, None, True, False, [create, *_extras(key, there)])
        elif here is not None and not _follows(here, key, source):
            drop = f"{sql_text(here.drop)};" if here.drop else f"only the target has this {key.kind}"
            yield _difference(key, None, False, True, [sql_comment(drop)])


def _difference(
    key: ObjectKey, attribute: str | None, source: Any, target: Any, statements: Sequence[str]
) -> SchemaDifference:
    return SchemaDifference(key.kind, key.name, attribute, source, target, tuple(map(sql_text, statements)))


def _follows(found: CatalogObject, key: ObjectKey, other: Mapping[ObjectKey, CatalogObject]) -> bool:
    """Return True for a part of a table that the other side does not have, and for the details of a sequence."""
    if key.kind == "sequence":
        return ObjectKey("relation", key.name) not in other
    return key.kind in _PARTS and found.table is not None and ObjectKey("relation", found.table) not in other


def _dump(key: ObjectKey) -> str:
    if key.kind == "relation":
        return sql_comment(f"pg_dump --schema-only --table={shell_word(key.name)} of the source has its statements")
    return sql_comment(f"pg_dump --schema-only of the source has the statement for this {key.kind}")


def _extras(key: ObjectKey, there: CatalogObject) -> Iterator[str]:
    """Yield statements for attributes that CREATE does not set."""
    if there.create is None:
        return
    for attribute in ("owner", "comment", "acl", "statistics", "enabled"):
        value = there.attributes.get(attribute)
        if value and (key.kind, attribute) not in _CREATED_WITH and value != "O":
            yield from _statements(key, there, attribute, value, None) or ()


def _attributes(key: ObjectKey, there: CatalogObject, here: CatalogObject) -> Iterator[SchemaDifference]:
    for attribute, wanted in there.attributes.items():
        existing = here.attributes.get(attribute)
        # The target creates its own, newer version of an extension.
        is_newer = (key.kind, attribute) == ("extension", "version") and is_older(wanted, str(existing))
        if wanted == existing or is_newer:
            continue
        statements = _statements(key, there, attribute, wanted, existing)
        if statements is None:
            statements = [sql_comment(f"the {attribute} of {key.kind} {key.name} can only be changed by hand")]
        yield _difference(key, attribute, wanted, existing, statements)


def _statements(key: ObjectKey, there: CatalogObject, attribute: str, wanted: Any, existing: Any) -> list[str] | None:
    """Return the statements that change one attribute on the target. None: there is no exact statement."""
    word, name = _word(key, there), key.name
    if attribute == "comment":
        return [f"COMMENT ON {_named(key, there)} IS {'NULL' if wanted is None else literal(wanted)};"]
    if attribute == "owner":
        return [f"ALTER {word} {name} OWNER TO {identifier(wanted)};"]
    if attribute == "acl" and key.kind != "default privileges":
        return list(_privileges(key, there, wanted or [], existing or []))
    if attribute == "enabled" and key.kind in ("trigger", "rule"):
        return [f"ALTER TABLE {there.table} {_ENABLED[wanted]} {key.kind.upper()} {_local(key, there)};"]
    if (key.kind, attribute) == ("index", "statistics"):
        return list(_index_statistics(key, wanted, existing or [None] * len(wanted)))
    if key.kind in _CREATED_AGAIN:
        extras = list(_extras(key, there))
        return [f"{there.drop};", f"{there.create};", *extras] if there.create and there.drop else None
    change = _CHANGES.get((key.kind, attribute))
    return change(key, there, wanted, existing) if change is not None else None


def _word(key: ObjectKey, there: CatalogObject) -> str:
    if key.kind == "relation":
        return str(there.attributes["kind"])
    if key.kind == "function":
        return _FUNCTIONS.get(there.attributes["kind"], "FUNCTION")
    return _WORDS.get(key.kind, key.kind.upper())


def _local(key: ObjectKey, there: CatalogObject) -> str:
    """Return the name of a part of a table, without the table."""
    assert there.table is not None
    return key.name[len(there.table) + 1 :]


def _named(key: ObjectKey, there: CatalogObject) -> str:
    if key.kind in _WITH_TABLE:
        return f"{key.kind.upper()} {_local(key, there)} ON {there.table}"
    return f"{_word(key, there)} {key.name}"


def _privileges(key: ObjectKey, there: CatalogObject, wanted: Sequence[str], existing: Sequence[str]) -> Iterator[str]:
    word = _word(key, there)
    on = "FUNCTION" if word == "AGGREGATE" else "TABLE" if key.kind == "relation" and word != "SEQUENCE" else word
    columns, place = "", f"{on} {key.name}"
    if key.kind == "column":
        columns, place = f" ({_local(key, there)})", f"TABLE {there.table}"
    for privilege in sorted(set(existing) - set(wanted)):
        kind, grantee = _split(privilege)[:2]
        yield f"REVOKE {kind}{columns} ON {place} FROM {grantee};"
    for privilege in sorted(set(wanted) - set(existing)):
        kind, grantee, option = _split(privilege)
        yield f"GRANT {kind}{columns} ON {place} TO {grantee}{option};"


def _split(privilege: str) -> tuple[str, str, str]:
    option = " WITH GRANT OPTION"
    text, has_option = (privilege.removesuffix(option), True) if privilege.endswith(option) else (privilege, False)
    kind, _, grantee = text.partition(" ")
    return kind, grantee, option if has_option else ""


def _index_statistics(key: ObjectKey, wanted: Sequence[Any], existing: Sequence[Any]) -> Iterator[str]:
    for number, (there, here) in enumerate(zip(wanted, existing, strict=False), 1):
        if there != here:
            target = -1 if there is None else there
            yield f"ALTER INDEX {key.name} ALTER COLUMN {number} SET STATISTICS {target};"


# --- statements of single attributes --------------------------------------------------------------


def _column_type(key: ObjectKey, there: CatalogObject, wanted: Any, existing: Any) -> list[str]:
    collation = there.attributes.get("collation")
    collate = f" COLLATE {collation}" if collation else ""
    return [f"ALTER TABLE {there.table} ALTER COLUMN {_local(key, there)} TYPE {there.attributes['type']}{collate};"]


def _column_default(key: ObjectKey, there: CatalogObject, wanted: Any, existing: Any) -> list[str] | None:
    if there.attributes.get("generated"):
        return None
    change = "DROP DEFAULT" if wanted is None else f"SET DEFAULT {wanted}"
    return [f"ALTER TABLE {there.table} ALTER COLUMN {_local(key, there)} {change};"]


def _column_not_null(key: ObjectKey, there: CatalogObject, wanted: Any, existing: Any) -> list[str]:
    change = "SET" if wanted else "DROP"
    return [f"ALTER TABLE {there.table} ALTER COLUMN {_local(key, there)} {change} NOT NULL;"]


def _column_statistics(key: ObjectKey, there: CatalogObject, wanted: Any, existing: Any) -> list[str]:
    number = -1 if wanted is None else wanted
    return [f"ALTER TABLE {there.table} ALTER COLUMN {_local(key, there)} SET STATISTICS {number};"]


def _column_storage(key: ObjectKey, there: CatalogObject, wanted: Any, existing: Any) -> list[str]:
    return [f"ALTER TABLE {there.table} ALTER COLUMN {_local(key, there)} SET STORAGE {_STORAGE[wanted]};"]


def _labels(key: ObjectKey, there: CatalogObject, wanted: Any, existing: Any) -> list[str] | None:
    """Add labels. They can be added anywhere, but neither removed nor moved."""
    if [label for label in wanted if label in existing] != existing:
        return None
    statements, before = [], None
    for label in wanted:
        if label not in existing:
            first = next((other for other in wanted if other in existing), None)
            place = f" AFTER {literal(before)}" if before is not None else f" BEFORE {literal(first)}" if first else ""
            statements.append(f"ALTER TYPE {key.name} ADD VALUE {literal(label)}{place};")
        before = label
    return statements


def _options(key: ObjectKey, there: CatalogObject, wanted: Any, existing: Any) -> list[str]:
    """Set and reset storage parameters, which are `name=value`."""
    new = dict(option.split("=", 1) for option in wanted or [])
    old = dict(option.split("=", 1) for option in existing or [])
    statements = []
    if removed := sorted(old.keys() - new.keys()):
        statements.append(f"ALTER {_word(key, there)} {key.name} RESET ({', '.join(map(identifier, removed))});")
    if changed := [f"{identifier(name)} = {literal(value)}" for name, value in new.items() if old.get(name) != value]:
        statements.append(f"ALTER {_word(key, there)} {key.name} SET ({', '.join(changed)});")
    return statements


def _logged(key: ObjectKey, there: CatalogObject, wanted: Any, existing: Any) -> list[str]:
    return [f"ALTER {_word(key, there)} {key.name} SET {_PERSISTENT[wanted]};"]


def _replica_identity(key: ObjectKey, there: CatalogObject, wanted: Any, existing: Any) -> list[str]:
    kind, index = there.attributes["replica identity"], there.attributes["identity index"]
    identity = {"d": "DEFAULT", "n": "NOTHING", "f": "FULL"}.get(kind) or f"USING INDEX {identifier(index or '')}"
    return [f"ALTER TABLE {key.name} REPLICA IDENTITY {identity};"]


def _clustered(key: ObjectKey, there: CatalogObject, wanted: Any, existing: Any) -> list[str]:
    change = "SET WITHOUT CLUSTER" if wanted is None else f"CLUSTER ON {identifier(wanted)}"
    return [f"ALTER TABLE {key.name} {change};"]


def _row_security(key: ObjectKey, there: CatalogObject, wanted: Any, existing: Any) -> list[str]:
    return [f"ALTER TABLE {key.name} {'ENABLE' if wanted else 'DISABLE'} ROW LEVEL SECURITY;"]


def _forced(key: ObjectKey, there: CatalogObject, wanted: Any, existing: Any) -> list[str]:
    return [f"ALTER TABLE {key.name} {'FORCE' if wanted else 'NO FORCE'} ROW LEVEL SECURITY;"]


def _definition(key: ObjectKey, there: CatalogObject, wanted: Any, existing: Any) -> list[str]:
    assert there.create is not None
    extras = _options(key, there, there.attributes["options"], None)  # which CREATE OR REPLACE removes
    if there.attributes["kind"] == "VIEW":
        return [f"{there.create.replace('CREATE VIEW', 'CREATE OR REPLACE VIEW', 1)};", *extras]
    return [f"{there.drop};", f"{there.create};", *extras]


def _function(key: ObjectKey, there: CatalogObject, wanted: Any, existing: Any) -> list[str] | None:
    return [f"{there.create};"] if there.create else None


def _sequence(key: ObjectKey, there: CatalogObject, wanted: Any, existing: Any) -> list[str]:
    values = there.attributes
    return [
        f"ALTER SEQUENCE {key.name} AS {values['type']} INCREMENT {values['increment']} MINVALUE {values['minimum']}"
        f" MAXVALUE {values['maximum']} START {values['start']} CACHE {values['cache']}"
        f" {'CYCLE' if values['cycle'] else 'NO CYCLE'};"
    ]


def _owned_by(key: ObjectKey, there: CatalogObject, wanted: Any, existing: Any) -> list[str]:
    return [f"ALTER SEQUENCE {key.name} OWNED BY {wanted or 'NONE'};"]


def _extension(key: ObjectKey, there: CatalogObject, wanted: Any, existing: Any) -> list[str]:
    return [f"ALTER EXTENSION {key.name} UPDATE TO {literal(wanted)};"]


_FUNCTION = ("body", "result", "language", "volatility", "strict", "security definer", "leakproof", "parallel", "cost",
             "rows", "settings")  # fmt: skip
_SEQUENCE = ("type", "start", "increment", "minimum", "maximum", "cycle", "cache")
_CHANGES = {
    ("column", "type"): _column_type,
    ("column", "collation"): _column_type,
    ("column", "default"): _column_default,
    ("column", "not null"): _column_not_null,
    ("column", "statistics"): _column_statistics,
    ("column", "storage"): _column_storage,
    ("enum", "labels"): _labels,
    ("relation", "logged"): _logged,
    ("relation", "options"): _options,
    ("relation", "replica identity"): _replica_identity,
    ("relation", "identity index"): _replica_identity,
    ("relation", "clustered on"): _clustered,
    ("relation", "row security"): _row_security,
    ("relation", "forced row security"): _forced,
    ("relation", "definition"): _definition,
    ("sequence", "owned by"): _owned_by,
    ("extension", "version"): _extension,
    **{("function", attribute): _function for attribute in _FUNCTION},
    **{("sequence", attribute): _sequence for attribute in _SEQUENCE},
}


def is_older(version: str, other: str) -> bool:
    """Return True if `version` precedes `other`, number by number. Versions with other texts have no order."""
    try:
        return [int(part) for part in version.split(".")] < [int(part) for part in other.split(".")]
    except ValueError:
        return False
