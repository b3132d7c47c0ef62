"""What `subscriber check` finds about sequences. The queries are in collect_sequences(), the rules do no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat

from subscriber import server_features as features
from subscriber.catalog.connection import Connection
from subscriber.check.model import CheckedSequence, Finding, Level, SequenceFacts
from subscriber.display import sql_identifier, sql_literal
from subscriber.publisher.answers import oid, parsing, signed
from subscriber.publisher.connection import Publisher
from subscriber.publisher.own_schema import IS_OWN
from subscriber.publisher.sequences import SequenceDefinition
from subscriber.quoting import qualified
from subscriber.remedy import Remedy, on_publisher, on_target
from subscriber.subscription import SequenceMode, Subscription

_SEQUENCES = f"""
SELECT n.nspname, c.relname,
       pg_catalog.has_sequence_privilege(c.oid, 'SELECT') AND pg_catalog.has_schema_privilege(n.oid, 'USAGE'),
       s.seqtypid, s.seqstart, s.seqincrement, s.seqmin, s.seqmax, s.seqcycle,
       (SELECT tn.nspname || '.' || t.relname || '.' || a.attname
          FROM pg_catalog.pg_depend d JOIN pg_catalog.pg_class t ON t.oid = d.refobjid
          JOIN pg_catalog.pg_namespace tn ON tn.oid = t.relnamespace
          JOIN pg_catalog.pg_attribute a ON a.attrelid = t.oid AND a.attnum = d.refobjsubid
         WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = c.oid
           AND d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.deptype IN ('a', 'i') LIMIT 1)
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_catalog.pg_sequence s ON s.seqrelid = c.oid
 WHERE c.relpersistence <> 't' AND c.oid >= 16384 AND NOT {IS_OWN}
 ORDER BY 1, 2
"""
_TYPES = {20: "bigint", 21: "smallint", 23: "integer"}


async def collect_sequences(
    target: Connection,
    publisher: Publisher,
    publications: Sequence[str],
    subscription: Subscription | None,
    *,
    role: str,
    all_tables: str | None,
) -> SequenceFacts:
    """Query both servers. `publications` exist."""
    local = {
        (row[0], row[1]): SequenceDefinition(row[3], row[4], row[5], row[6], row[7], row[8])
        for row in await target.fetch(_SEQUENCES)
    }
    rows = await publisher.session.rows(_SEQUENCES)
    published = await publisher.sequences(publications) if publications else []
    with parsing("sequences"):
        found = tuple(map(_checked, rows, repeat(local)))
    return SequenceFacts(
        version=publisher.server_version,
        role=role,
        sequences=found,
        published=frozenset(published),
        named=frozenset(() if subscription is None else subscription.sequence_names),
        mode=SequenceMode.COPY if subscription is None else subscription.sequences,
        all_tables=all_tables,
    )


def _checked(row: tuple[str | None, ...], local: Mapping[tuple[str, str], SequenceDefinition]) -> CheckedSequence:
    schema, name, readable, type_oid, start, increment, least, greatest, cycles, owner = row
    limits = signed(start), signed(increment), signed(least), signed(greatest)
    definition = SequenceDefinition(oid(type_oid), *limits, cycles=cycles == "t")
    found = schema or "", name or ""
    return CheckedSequence(found, readable == "t", definition, owner, local.get(found))


def synchronized_names(facts: SequenceFacts) -> list[tuple[str, str]]:
    """Return the names of the publisher's sequences whose values the subscription sets on the target."""
    if facts.mode is SequenceMode.NONE:
        return []
    wanted = [one for one in facts.sequences if one.name in facts.published | facts.named]
    return [one.name for one in wanted if one.on_target is not None or not _is_implied(one, facts)]


def _is_implied(sequence: CheckedSequence, facts: SequenceFacts) -> bool:
    """Return True if only a published column makes the sequence part of the subscription."""
    return not features.PUBLISHED_SEQUENCES.is_in(facts.version) and sequence.name not in facts.named


def sequence_findings(facts: SequenceFacts) -> Iterator[Finding]:
    """Yield what keeps sequences from being synchronized, with the statement for each."""
    if facts.mode is SequenceMode.NONE:
        return
    for sequence in facts.sequences:
        who = f"sequence {'.'.join(sequence.name)}"
        if sequence.name in facts.published | facts.named:
            yield from _synchronized(who, sequence, facts)
        else:
            yield _left_out(who, sequence, facts)
    for name in sorted(facts.named - {sequence.name for sequence in facts.sequences}):
        who = f"sequence {'.'.join(name)}"
        yield Finding(Level.ERROR, who, "it is named by sequence_names, and the publisher has no sequence of that name")


def _synchronized(who: str, sequence: CheckedSequence, facts: SequenceFacts) -> Iterator[Finding]:
    name = qualified(*sequence.name)
    implied = _is_implied(sequence, facts)
    if sequence.on_target is None and implied:
        yield Finding(Level.OK, who, f"owned by published column {sequence.owner}; the target has no such sequence")
        return
    found = False
    if not sequence.readable:
        found = True
        role = sql_identifier(facts.role)
        grant = f"GRANT SELECT ON SEQUENCE {name} TO {role};"
        if sequence.name[0] != "public":
            grant += f" GRANT USAGE ON SCHEMA {sql_identifier(sequence.name[0])} TO {role};"
        yield Finding(Level.ERROR, who, f'role "{facts.role}" may not read it on the publisher', on_publisher(grant))
    if sequence.on_target is None:
        found = True
        yield Finding(
            Level.ERROR,
            who,
            "it does not exist on the target",
            on_target(f"CREATE SEQUENCE {name} {_definition(sequence.definition)};"),
        )
    elif sequence.on_target != sequence.definition:
        found = True
        yield Finding(
            Level.ERROR,
            who,
            f"it is defined differently on the target: {_definition(sequence.on_target)}",
            on_target(f"ALTER SEQUENCE {name} {_definition(sequence.definition)};"),
        )
    if not found:
        why = f"owned by published column {sequence.owner}" if implied else "published"
        if sequence.name in facts.named:
            why = "named by sequence_names"
        yield Finding(Level.OK, who, f"{why}, and defined alike on both sides")


def _left_out(who: str, sequence: CheckedSequence, facts: SequenceFacts) -> Finding:
    owner = "" if sequence.owner is None else f", although it is owned by column {sequence.owner}"
    fix = Remedy(f"Add to the options of the subscription: sequence_names = {sql_literal(qualified(*sequence.name))}")
    if features.PUBLISHED_SEQUENCES.is_in(facts.version) and facts.all_tables is not None:
        fix = on_publisher(f"ALTER PUBLICATION {sql_identifier(facts.all_tables)} SET ALL TABLES, ALL SEQUENCES;")
    elif features.PUBLISHED_SEQUENCES.is_in(facts.version):
        fix = fix.with_alternative(Remedy("CREATE PUBLICATION … FOR ALL SEQUENCES;"))
    return Finding(Level.WARNING, who, f"it is not published{owner}, and will not be synchronized", fix)


def _definition(definition: SequenceDefinition) -> str:
    cycle = "CYCLE" if definition.cycles else "NO CYCLE"
    return (
        f"AS {_TYPES.get(definition.type_oid, 'bigint')} INCREMENT {definition.increment} MINVALUE {definition.least}"
        f" MAXVALUE {definition.greatest} START {definition.start} {cycle}"
    )
