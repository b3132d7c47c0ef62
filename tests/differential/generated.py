"""Random tables: the types of their columns, replica identities, partitions, and differences on the targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from tests.differential.kinds import KEY_KINDS, KINDS, Kind
from tests.differential.tables import Table, Value, key, number

# BEFORE triggers on the targets that suppress changes. They never cause a later duplicate key: a row whose deletion is
# suppressed has no key, and a suppressed update keeps its key. They read only the key, because a column may be added to
# one target a moment before the other.
INSERT_TRIGGER = ("INSERT", "hashtext(NEW.{key}::text) % 4 = 0")
UPDATE_TRIGGER = ("UPDATE", "hashtext(NEW.{key}::text) % 4 = 0 AND {kept}")
DELETE_TRIGGER = ("DELETE", "hashtext(OLD.{key}::text) % 3 = 0")


@dataclass
class Drawing:
    """One table in the making."""

    name: str
    random: Random
    keyed: bool  # rows are found by a key, not by all they have
    columns: dict[str, str] = field(default_factory=dict)  # with their types, and constraints
    values: dict[str, Value] = field(default_factory=dict)
    key: tuple[str, ...] = ()
    comparable: bool = True  # see Table

    def add(self, name: str, kind: Kind, *, external: bool = False) -> None:
        keyed = self.keyed
        self.comparable &= kind.equality
        self.columns[name] = kind.type + (" STORAGE EXTERNAL" if external else "")
        self.values[name] = lambda random: kind.value(random, keyed=keyed)

    def create(self, columns: Sequence[str], *, suffix: str = "", name: str = "") -> str:
        listed = ", ".join(columns)
        return f"CREATE TABLE {name or self.name} ({listed}){suffix}"

    def defined(self, names: Sequence[str]) -> list[str]:
        return [f"{name} {self.columns[name]}" for name in names]

    def shuffled(self) -> list[str]:
        names = list(self.columns)
        self.random.shuffle(names)
        return names


def kinds_for(*, binary: bool, xml: bool) -> list[Kind]:
    """Return the kinds that both servers support; `xml`: the servers have been built with it."""
    return [kind for kind in KINDS if (kind.binary or not binary) and (xml or kind.type != "xml")]


def generate(random: Random, index: int, kinds: Sequence[Kind]) -> Table:
    """Return the table with that number."""
    name = f"t{index}"
    layout = random.choices(["plain", "leaves", "roots"], [6, 1, 2])[0]
    identity = random.choices(["key", "index", "whole", "nothing", "none"], [5, 2, 4, 1, 1])[0]
    if layout != "plain" and identity == "index":
        identity = "key"
    drawing = Drawing(name, random, keyed=identity != "whole")
    usable = [kind for kind in kinds if identity != "whole" or kind.equality]
    _add_key(drawing, identity, partitioned=layout != "plain")
    for number_ in range(random.choice([1, 3, 6, 9])):
        kind = random.choice(usable)
        drawing.add(f"c{number_}", kind, external=kind.large is not None and random.random() < 0.5)
    if layout == "plain":
        source, target = _plain(drawing, identity)
    else:
        source, target = _partitioned(drawing, identity, whole_target=layout == "roots")
    changes = identity not in ("nothing", "none")
    return Table(
        name,
        drawing.values,
        tuple(source),
        tuple(target),
        key=drawing.key,
        publication="roots" if layout == "roots" else "leaves",
        changes=changes,
        local_delete=changes and layout != "leaves" and random.random() < 0.4,
        local_update=changes and layout != "leaves" and random.random() < 0.5,
        triggers=_triggers(drawing, identity) if changes and layout == "plain" and random.random() < 0.25 else (),
        kinds=usable,
        identity=identity,
        comparable=drawing.comparable,
    )


def _add_key(drawing: Drawing, identity: str, *, partitioned: bool) -> None:
    random = drawing.random
    if identity in ("whole", "nothing", "none"):
        drawing.columns["n"] = "int"
        drawing.values["n"] = number if not partitioned else key
        drawing.key = ("n",)
        return
    drawing.columns["id"] = "int NOT NULL"
    drawing.values["id"] = key
    if partitioned or random.random() < 0.4:
        drawing.key = ("id",)
        return
    names = [f"k{n}" for n in range(random.choice([1, 1, 2]))]
    for name in names:
        chosen = random.choice(list(KEY_KINDS))
        drawing.columns[name] = f"{chosen} NOT NULL"
        drawing.values[name] = KEY_KINDS[chosen]
    drawing.key = tuple(names)
    if identity == "key" and random.random() < 0.5:  # else `id` is an ordinary column, and NOT NULL
        drawing.key = ("id", *names)


def _identity(name: str, identity: str) -> list[str]:
    match identity:
        case "whole":
            return [f"ALTER TABLE {name} REPLICA IDENTITY FULL"]
        case "nothing":
            return [f"ALTER TABLE {name} REPLICA IDENTITY NOTHING"]
        case "index":
            return [f"ALTER TABLE {name} REPLICA IDENTITY USING INDEX {name}_k"]
        case _:
            return []


def _plain(drawing: Drawing, identity: str) -> tuple[list[str], list[str]]:
    random, name = drawing.random, drawing.name
    names = ", ".join(drawing.key)
    unique = {
        "key": [f"ALTER TABLE {name} ADD PRIMARY KEY ({names})"],
        "index": [f"CREATE UNIQUE INDEX {name}_k ON {name} ({names})"],
    }.get(identity, [])
    source_columns = drawing.defined(list(drawing.columns))
    source = [drawing.create(source_columns), *unique, *_identity(name, identity)]
    if random.random() < 0.4:
        return source, []
    order = drawing.shuffled() if random.random() < 0.7 else list(drawing.columns)
    columns, after = drawing.defined(order), []
    if random.random() < 0.4:
        columns.insert(random.randint(0, len(columns)), "gone text DEFAULT 'gone'")
        after.append(f"ALTER TABLE {name} DROP COLUMN gone")
    if random.random() < 0.4:  # a row that is found by all it has would have to have NULL there
        extra = "extra int" if identity == "whole" else "extra timestamptz DEFAULT '2024-01-01'"
        columns.insert(random.randint(0, len(columns)), extra)
    if random.random() < 0.2:
        first = next(iter(drawing.columns))
        columns.append(f"computed int GENERATED ALWAYS AS ({first} * 2) STORED")
    if identity == "whole" and random.random() < 0.4:
        after.append(f"CREATE INDEX ON {name} (n)")
    match identity:
        case "index" if random.random() < 0.4:  # columns sent as the key may be the target's key
            unique = [f"ALTER TABLE {name} ADD PRIMARY KEY ({names})"]
        case "index":
            unique += _identity(name, identity)
        case "whole" if random.random() < 0.3:
            unique += _identity(name, identity)
    target = [drawing.create(columns), *after, *unique]
    return source, target


def _partitioned(drawing: Drawing, identity: str, *, whole_target: bool) -> tuple[list[str], list[str]]:
    """Return the statements for partitioned tables on the source and on the targets.

    `whole_target`: changes are published as the root's, so the target's table may have other partitions, or none.
    """
    random, name, column = drawing.random, drawing.name, drawing.key[0]
    primary = [f"ALTER TABLE {name} ADD PRIMARY KEY ({column})"] if identity == "key" else []
    tail = " PARTITION BY "

    def divided(method: str, order: Sequence[str]) -> list[str]:
        """Create a table of two partitions. One was created separately, with its columns in another order."""
        bounds = {
            "RANGE": ("FROM (MINVALUE) TO (9)", None),
            "HASH": ("WITH (MODULUS 2, REMAINDER 0)", "WITH (MODULUS 2, REMAINDER 1)"),
            "LIST": ("IN (1, 3, 5, 7, 11, 13)", None),
        }[method]
        second = "DEFAULT" if bounds[1] is None else f"FOR VALUES {bounds[1]}"
        columns = drawing.defined(order)
        other = [*columns[1:], "junk int", columns[0]]
        return [
            drawing.create(columns, suffix=f"{tail}{method} ({column})"),
            f"CREATE TABLE {name}_a PARTITION OF {name} FOR VALUES {bounds[0]}",
            drawing.create(other, name=f"{name}_b"),
            f"ALTER TABLE {name}_b DROP COLUMN junk",
            f"ALTER TABLE {name} ATTACH PARTITION {name}_b {second}",
        ]

    identities = [statement for part in (name, f"{name}_a", f"{name}_b") for statement in _identity(part, identity)]
    method = random.choice(["RANGE", "HASH", "LIST"])
    source = [*divided(method, list(drawing.columns)), *primary, *identities]
    if not whole_target or random.random() < 0.3:
        return source, []
    order = drawing.shuffled()
    if random.random() < 0.3:
        return source, [drawing.create(drawing.defined(order)), *primary]
    other = random.choice([m for m in ("RANGE", "HASH", "LIST") if m != method])
    return source, [*divided(other, order), *primary]


def _triggers(drawing: Drawing, identity: str) -> tuple[str, ...]:
    """Return the statements for triggers on the targets."""
    name = drawing.name
    triggers = [INSERT_TRIGGER, UPDATE_TRIGGER, *([] if identity in ("key", "index") else [DELETE_TRIGGER])]
    event, when = drawing.random.choice(triggers)
    kept = " AND ".join(f"OLD.{column} IS NOT DISTINCT FROM NEW.{column}" for column in drawing.key)
    row = "OLD" if event == "DELETE" else "NEW"
    return (
        f"CREATE FUNCTION {name}_leave_out() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF {when.format(key=drawing.key[0], kept=kept)} THEN RETURN NULL; END IF; RETURN {row}; END $$",
        f"CREATE TRIGGER leave_out BEFORE {event} ON {name} FOR EACH ROW EXECUTE FUNCTION {name}_leave_out()",
        f"ALTER TABLE {name} ENABLE {drawing.random.choice(['ALWAYS', 'REPLICA'])} TRIGGER leave_out",
    )
