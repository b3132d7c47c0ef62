"""What `subscriber check` finds about sequences. The queries are in collect_sequences(), the rules do no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat

import asyncpg

from subscriber import server_features as features
from subscriber.catalog.connection import Connection
from subscriber.check.model import CheckedSequence, Finding, Level, SequenceAccess, SequenceFacts
from subscriber.check.recipe import OwnedTable, TargetRoles, act_as_remedy
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
# $1 is the owner of the subscription. $2: it sets the sequences itself. A sequence follows the owner of its table.
_DENIED = """
SELECT n.nspname, c.relname, coalesce(t.nspname, n.nspname), coalesce(t.relname, c.relname), r.rolname::text,
       r.rolsuper, t.relname IS NULL, CASE WHEN m.may_act THEN m.acting ELSE $1::text END, m.may_act
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_catalog.pg_roles r ON r.oid = c.relowner,
       LATERAL (SELECT CASE WHEN $2 THEN $1::text ELSE r.rolname::text END AS acting,
                       $2 OR pg_catalog.pg_has_role($1::text::name, r.oid, '{membership}') AS may_act) m
  LEFT JOIN LATERAL (SELECT tn.nspname, t.relname
                       FROM pg_catalog.pg_depend d JOIN pg_catalog.pg_class t ON t.oid = d.refobjid
                       JOIN pg_catalog.pg_namespace tn ON tn.oid = t.relnamespace
                      WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = c.oid
                        AND d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.deptype IN ('a', 'i')
                      LIMIT 1) t ON true
 WHERE c.relkind = 'S' AND c.oid >= 16384
   AND NOT (m.may_act AND pg_catalog.has_sequence_privilege(m.acting::name, c.oid, 'UPDATE'))
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
    owner = await target.fetchval("SELECT current_user::text") if subscription is None else subscription.owner
    itself = subscription is not None and subscription.run_as_owner
    query = _DENIED.format(membership=features.set_role_privilege(target.get_server_version().major))
    denied = {(row[0], row[1]): _denied(row) for row in await target.fetch(query, owner, itself)}
    rows = await publisher.session.rows(_SEQUENCES)
    published = await publisher.sequences(publications) if publications else []
    with parsing("sequences"):
        checked = tuple(map(_checked, rows, repeat(local), repeat(denied)))
    return SequenceFacts(
        version=publisher.server_version,
        role=role,
        sequences=checked,
        published=frozenset(published),
        named=frozenset(() if subscription is None else subscription.sequence_names),
        mode=SequenceMode.COPY if subscription is None else subscription.sequences,
        all_tables=all_tables,
    )


def _denied(row: asyncpg.Record) -> SequenceAccess:
    _, _, schema, name, owner, owner_is_superuser, is_sequence, acting, may_act = row
    owned = OwnedTable(schema, name, owner, owner_is_superuser, is_sequence=is_sequence)
    return SequenceAccess(owned, acting, may_act)


def _checked(
    row: tuple[str | None, ...],
    local: Mapping[tuple[str, str], SequenceDefinition],
    denied: Mapping[tuple[str, str], SequenceAccess],
) -> CheckedSequence:
    schema, name, readable, type_oid, start, increment, least, greatest, cycles, owner = row
    limits = signed(start), signed(increment), signed(least), signed(greatest)
    definition = SequenceDefinition(oid(type_oid), *limits, cycles=cycles == "t")
    key = schema or "", name or ""
    return CheckedSequence(key, readable == "t", definition, owner, local.get(key), denied.get(key))


def synchronized_names(facts: SequenceFacts) -> list[tuple[str, str]]:
    """Return the names of the publisher's sequences whose values the subscription sets on the target."""
    if facts.mode is SequenceMode.NONE:
        return []
    wanted = [sequence for sequence in facts.sequences if sequence.name in facts.published | facts.named]
    return [sequence.name for sequence in wanted if sequence.on_target is not None or not _is_implied(sequence, facts)]


def _is_implied(sequence: CheckedSequence, facts: SequenceFacts) -> bool:
    """Return True if only a published column makes the sequence part of the subscription."""
    return not features.PUBLISHED_SEQUENCES.is_in(facts.version) and sequence.name not in facts.named


def sequence_findings(facts: SequenceFacts, roles: TargetRoles | None) -> Iterator[Finding]:
    """Yield what keeps sequences from being synchronized, with the statement for each."""
    if facts.mode is SequenceMode.NONE:
        return
    for sequence in facts.sequences:
        who = f"sequence {'.'.join(sequence.name)}"
        if sequence.name in facts.published | facts.named:
            yield from _synchronized(who, sequence, facts, roles)
        else:
            yield _left_out(who, sequence, facts)
    for name in sorted(facts.named - {sequence.name for sequence in facts.sequences}):
        who = f"sequence {'.'.join(name)}"
        yield Finding(Level.ERROR, who, "it is named by sequence_names, and the publisher has no sequence of that name")


def _synchronized(
    who: str, sequence: CheckedSequence, facts: SequenceFacts, roles: TargetRoles | None
) -> Iterator[Finding]:
    name = qualified(*sequence.name)
    implied = _is_implied(sequence, facts)
    if sequence.on_target is None and implied:
        yield Finding(Level.OK, who, f"owned by published column {sequence.owner}; the target has no such sequence")
        return
    is_synchronized = False
    if not sequence.readable:
        is_synchronized = True
        role = sql_identifier(facts.role)
        grant = f"GRANT SELECT ON SEQUENCE {name} TO {role};"
        if sequence.name[0] != "public":
            grant += f" GRANT USAGE ON SCHEMA {sql_identifier(sequence.name[0])} TO {role};"
        yield Finding(Level.ERROR, who, f'role "{facts.role}" may not read it on the publisher', on_publisher(grant))
    if sequence.on_target is None:
        is_synchronized = True
        yield Finding(
            Level.ERROR,
            who,
            "it does not exist on the target",
            on_target(_create(name, sequence, roles)),
        )
    elif sequence.on_target != sequence.definition:
        is_synchronized = True
        yield Finding(
            Level.ERROR,
            who,
            f"it is defined differently on the target: {_definition(sequence.on_target)}",
            on_target(f"ALTER SEQUENCE {name} {_definition(sequence.definition)};"),
        )
    if sequence.denied is not None:
        is_synchronized = True
        yield Finding(Level.ERROR, who, *_refusal(sequence.name, sequence.denied, roles))
    if not is_synchronized:
        why = f"owned by published column {sequence.owner}" if implied else "published"
        if sequence.name in facts.named:
            why = "named by sequence_names"
        yield Finding(Level.OK, who, f"{why}, and defined alike on both sides")


def _create(name: str, sequence: CheckedSequence, roles: TargetRoles | None) -> str:
    """Return the statements that create a sequence on the target, with an owner whom the apply role acts as."""
    create = f"CREATE SEQUENCE {name} {_definition(sequence.definition)};"
    owner = None if roles is None else roles.application_owners.get(sequence.name[0])
    return create if owner is None else f"{create} ALTER SEQUENCE {name} OWNER TO {sql_identifier(owner)};"


def _refusal(name: tuple[str, str], denied: SequenceAccess, roles: TargetRoles | None) -> tuple[str, Remedy | None]:
    if denied.may_act:
        grant = f"GRANT UPDATE ON SEQUENCE {qualified(*name)} TO {sql_identifier(denied.acting)};"
        return f'role "{denied.acting}", which sets it on the target, lacks UPDATE', on_target(grant)
    remedy = None if roles is None else act_as_remedy(roles, denied.owned)
    return f'role "{denied.acting}", which owns the subscription, cannot SET ROLE to "{denied.owned.owner}"', remedy


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
