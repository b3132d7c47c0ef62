"""`subscriber check`: turn facts about both servers into findings, each with its fix. No I/O here.

An error keeps the subscription from working. A warning does not, or not yet.

Source: PostgreSQL's requirements are in logical-replication-config, relation.c (logicalrep_rel_open) and
execReplication.c (CheckCmdReplicaIdentity).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from subscriber import formatting
from subscriber import server_features as features
from subscriber.catalog.commands.privileges import created_by_superuser, owner_remedy
from subscriber.catalog.schema import RENAME_FOREIGN
from subscriber.check.failover import failover_findings
from subscriber.check.model import (
    AppliedTable,
    ApplyFacts,
    CheckedSourceTable,
    CheckedTargetTable,
    Facts,
    Finding,
    Level,
    PublicationFacts,
    PublisherFacts,
    SlotFacts,
    TargetFacts,
)
from subscriber.check.recipe import OwnedTable, act_as_remedy, apply_statements
from subscriber.check.sequences import sequence_findings
from subscriber.display import shell_word, sql_identifier, sql_literal, sql_name, sql_type, table_dump
from subscriber.publisher.publications import missing_remedy
from subscriber.publisher.table_access import grant_read
from subscriber.remedy import Remedy, on_publisher, on_target, run
from subscriber.subscription import OPTIONS, TwoPhaseState
from subscriber.targets.postgres.session.capabilities import WITHOUT_ORIGINS, WITHOUT_REPLICA_ROLE

OLDEST_TESTED = 13  # major version of publishers
PREPARED = 10  # recommended max_prepared_transactions if the publisher's value is not known
_BY_SUPERUSER = Remedy("Have a superuser run the first subscriber exec on this database.")
SYNC_WORKERS = 2  # tables copied at the same time, each with its own slot and walsender


def findings(facts: Facts) -> list[Finding]:
    """Return all findings, including those without a problem, in the order in which to fix them."""
    results = list(facts.failures)
    if facts.publisher is not None:
        results += publisher_findings(facts.publisher, facts.is_new)
    results += publication_findings(facts.publications)
    results += [Finding(Level.ERROR, "publications", message, remedy) for message, remedy in facts.unpublished]
    if facts.publisher is not None and not facts.is_new:
        results += slot_findings(facts.slot, facts.subscription or "")
    if facts.failover is not None:
        results += failover_findings(facts.failover)
    if facts.target is not None:
        results += target_findings(facts.target, is_new=facts.is_new)
        results += launcher_findings(facts)
        results += apply_findings(facts)
    if facts.publisher is not None and facts.target is not None:
        results += encoding_findings(facts.publisher, facts.target)
    if facts.two_phase is not TwoPhaseState.DISABLED:
        results += two_phase_findings(facts)
    for source, target in facts.tables:
        results += table_findings(source, target, facts)
    if facts.sequences is not None:
        results += sequence_findings(facts.sequences, facts.target_roles)
    return results


# --- the publisher --------------------------------------------------------------------------------


def publisher_findings(facts: PublisherFacts, is_new: bool, sync_workers: int = SYNC_WORKERS) -> Iterator[Finding]:
    who = "publisher"
    yield from _version(who, facts.version, facts.version_text)
    if facts.wal_level == "logical":
        yield Finding(Level.OK, who, "wal_level is logical")
    elif facts.can_decode:
        yield Finding(
            Level.OK,
            who,
            f"wal_level is {facts.wal_level}, which a logical slot raises to logical; effective_wal_level is"
            f" {facts.effective_wal_level}",
        )
    else:
        least = "replica" if facts.effective_wal_level is not None else "logical"
        yield Finding(
            Level.ERROR,
            who,
            f"wal_level is {facts.wal_level}, not {least}",
            run(f"ALTER SYSTEM SET wal_level = '{least}'; -- and restart the server"),
            "wal_level",
        )
    if facts.in_recovery and not features.DECODING_STANDBY.is_in(facts.version):
        message = "it is a standby, which can publish since PostgreSQL 16 only"
        yield Finding(Level.ERROR, who, message, Remedy("Use the primary."), "standby")
    wanted = sync_workers + 1 if is_new else sync_workers
    yield from _free(who, "replication slots", "max_replication_slots", facts.slots, facts.max_slots, wanted, is_new)
    yield from _free(who, "walsenders", "max_wal_senders", facts.senders, facts.max_senders, wanted, is_new)
    if facts.may_replicate:
        yield Finding(Level.OK, who, f'role "{facts.role}" may replicate')
    else:
        role = sql_identifier(facts.role)
        yield Finding(
            Level.ERROR,
            who,
            f'role "{facts.role}" may not replicate',
            run(f"ALTER ROLE {role} WITH REPLICATION;"),
            "replication",
        )


def _version(who: str, version: int, text: str) -> Iterator[Finding]:
    if not features.LOGICAL_REPLICATION.is_in(version):
        message = f"PostgreSQL {text} has no logical replication"
        upgrade = Remedy(f"Upgrade to {features.LOGICAL_REPLICATION.since} or later.")
        yield Finding(Level.ERROR, who, message, upgrade, "version")
    elif version // 10_000 < OLDEST_TESTED:
        yield Finding(
            Level.WARNING,
            who,
            f"PostgreSQL {text} is older than the versions that subscriber is tested with",
            kind="version",
        )
    else:
        yield Finding(Level.OK, who, f"PostgreSQL {text}")


def _free(who: str, what: str, setting: str, used: int, limit: int, wanted: int, needed: bool) -> Iterator[Finding]:
    """Compare free slots, workers or walsenders with the number wanted.

    With `needed`, none free is an error, else a warning.
    """
    free = limit - used
    if free >= wanted:
        yield Finding(Level.OK, who, f"{free} of {limit} {what} are free")
        return
    level = Level.ERROR if free < 1 and needed else Level.WARNING
    fix = run(f"ALTER SYSTEM SET {setting} = {used + wanted + 5}; -- and restart the server")
    message = f"{max(free, 0)} of {limit} {what} are free; {wanted} are wanted while tables are copied"
    yield Finding(level, who, message, fix, setting)


def publication_findings(publications: Sequence[PublicationFacts]) -> Iterator[Finding]:
    for publication in publications:
        who = f"publication {publication.name}"
        if not publication.exists:
            fix = missing_remedy(publication.name, publication.others)
            yield Finding(Level.ERROR, who, "does not exist on the publisher", fix)
            continue
        kinds = {
            "insert": publication.inserts,
            "update": publication.updates,
            "delete": publication.deletes,
            "truncate": publication.truncates,
        }
        left_out = [kind for kind, published in kinds.items() if not published]
        if left_out:
            name = sql_identifier(publication.name)
            fix = on_publisher(f"ALTER PUBLICATION {name} SET (publish = 'insert, update, delete, truncate');")
            yield Finding(Level.WARNING, who, f"does not publish {', '.join(left_out)}: the target will differ", fix)
        else:
            yield Finding(Level.OK, who, "publishes " + ", ".join(kinds))


def slot_findings(slot: SlotFacts | None, subscription: str) -> Iterator[Finding]:
    who = "publisher"
    reseed = f"subscriber reseed {shell_word(subscription)}"
    again = Remedy("make a new slot, and repair only the rows that differ", reseed)
    if slot is None:
        yield Finding(
            Level.ERROR, who, "the subscription has no slot", Remedy("ALTER SUBSCRIPTION … SET (slot_name = …)")
        )
    elif not slot.exists:
        yield Finding(Level.ERROR, who, f'replication slot "{slot.name}" does not exist', again)
    elif slot.is_lost:
        yield Finding(Level.ERROR, who, f'replication slot "{slot.name}" has been invalidated', again)
    elif not slot.in_this_database:
        fix = Remedy("Correct the subscription's connection or its slot_name.")
        yield Finding(Level.ERROR, who, f'replication slot "{slot.name}" is of another database', fix)
    elif slot.plugin != "pgoutput":
        fix = Remedy("Set slot_name to a slot of pgoutput.")
        yield Finding(Level.ERROR, who, f'replication slot "{slot.name}" is for {slot.plugin}, not pgoutput', fix)
    else:
        yield Finding(Level.OK, who, f'replication slot "{slot.name}" is there')


# --- the target -----------------------------------------------------------------------------------


def target_findings(facts: TargetFacts, *, is_new: bool = True) -> Iterator[Finding]:
    who = "target"
    yield from _version(who, facts.version, facts.version_text)
    if facts.in_recovery:
        yield Finding(
            Level.ERROR, who, "it is a standby and cannot be written to", Remedy("Use the primary."), "standby"
        )
    yield from _free(
        who, "replication origins", facts.origins_setting, facts.origins, facts.max_origins, SYNC_WORKERS + 1, True
    )
    if facts.has_foreign_schema:
        message = 'schema "subscriber" belongs to another program, and subscriber needs one of this name'
        yield Finding(Level.ERROR, who, message, run(RENAME_FOREIGN), "foreign_schema")
    if facts.is_superuser:
        yield Finding(Level.OK, who, f'role "{facts.role}" is a superuser')
        return
    role, before = sql_identifier(facts.role), "-- as a superuser: "
    if not facts.has_schema and not facts.may_create_schema:
        yield Finding(
            Level.ERROR,
            who,
            f'schema "subscriber" does not exist, and role "{facts.role}" may not create it',
            Remedy("Run any subscriber exec once on this database as a superuser."),
            "own_schema",
        )
    if not facts.may_create_subscription and is_new:
        database = sql_identifier(facts.database)
        grant = f"GRANT pg_create_subscription TO {role}; GRANT CREATE ON DATABASE {database} TO {role};"
        fix = run(grant)
        if not features.CREATE_SUBSCRIPTION_ROLE.is_in(facts.version):
            fix = created_by_superuser(facts.role)
        message = f'role "{facts.role}" may not create subscriptions'
        yield Finding(Level.ERROR, who, message, fix, "create_subscription")
    if facts.origins_by_superuser:  # functions of schema "subscriber" do both
        return
    if not facts.may_set_replication_role:
        fix = run(f"{before}GRANT SET ON PARAMETER session_replication_role TO {role};")
        if not features.GRANT_SET.is_in(facts.version):
            fix = Remedy("It can be granted since PostgreSQL 15. Upgrade the target.").with_alternative(_BY_SUPERUSER)
        yield Finding(Level.WARNING, who, WITHOUT_REPLICA_ROLE, fix, "replica_role")
    yield Finding(Level.WARNING, who, WITHOUT_ORIGINS, _BY_SUPERUSER, "origins")


def launcher_findings(facts: Facts) -> Iterator[Finding]:
    """Return findings about the launcher's role: its duty, and the owner of the subscription, whom it inherits from."""
    assert facts.target is not None
    role, owner = facts.target.role, facts.subscription_owner
    if facts.target.is_unserved:
        message = f'no launcher runs, and role "{role}" may not run subscriptions on this database'
        admit = f"SELECT subscriber.admit({sql_literal(role)}, 'launcher'); -- as the owner of schema subscriber"
        yield Finding(Level.ERROR, "target", message, run(admit))
    if owner is None or facts.subscription is None or facts.target.is_superuser or owner.inherited:
        return
    message = f'role "{role}" may not run the subscription, which belongs to role "{owner.name}"'
    remedy = owner_remedy(facts.subscription, owner.name, role, owner_is_superuser=owner.is_superuser)
    yield Finding(Level.ERROR, "target", message, remedy)


def apply_findings(facts: Facts) -> Iterator[Finding]:
    """Return findings about the session that applies changes: the code that it runs, and the rights of that code."""
    session = facts.apply
    if session is None:
        return
    if not session.is_admitted:
        fix = run(
            f"SELECT subscriber.admit({sql_literal(session.role)}, 'apply'); -- as the owner of schema subscriber"
        )
        yield Finding(Level.ERROR, "target", f'role "{session.role}" may not apply changes', fix)
        return
    refused = False
    for table in session.tables:
        who = f"table {table.schema}.{table.name}"
        if problem := _refusal(session, table, facts):
            refused = True
            yield Finding(Level.ERROR, who, *problem)
        if exceeded := [code for code in table.code if code.exceeded]:
            refused = True
            owners = ", ".join(f'"{owner}"' for owner in sorted({code.owner for code in exceeded}))
            message = (
                f'role "{session.role}" must not apply its changes: they run code of role {owners}, which could do '
                f"there whatever the session's role may do: {'; '.join(code.what for code in exceeded)}"
            )
            yield Finding(Level.ERROR, who, message, _apply_role(facts))
    if not refused and session.is_superuser:
        message = f'role "{session.role}", a superuser, applies changes: no table runs code of another role'
        yield Finding(Level.OK, "target", message)
    elif not refused:
        yield Finding(Level.OK, "target", f'role "{session.role}" applies changes')


def _refusal(session: ApplyFacts, table: AppliedTable, facts: Facts) -> tuple[str, Remedy | None] | None:
    """Return why the session may not apply changes of a table, and what to do about it. None: it may."""
    owner = facts.subscription_owner
    if not session.is_superuser and not table.may_act:
        if table.acting == table.owner:
            remedy = _owner_remedy(table.schema, table.name, table.owner, facts)
            return f'role "{session.role}" may not act as its owner on the target', remedy
        name, role = sql_identifier(facts.subscription or ""), sql_identifier(session.role)
        return (
            f'role "{session.role}" may not act as role "{table.acting}", which owns the subscription (run_as_owner)',
            Remedy(
                "give the subscription to the role that applies changes, with subscriber exec",
                f"ALTER SUBSCRIPTION {name} OWNER TO {role};",
                alternative=Remedy(
                    "apply changes as the owners", f"ALTER SUBSCRIPTION {name} SET (run_as_owner = false);"
                ),
            ),
        )
    if owner is not None and not table.owner_may_act:
        remedy = _owner_remedy(table.schema, table.name, table.owner, facts)
        return f'role "{owner.name}", which owns the subscription, cannot SET ROLE to "{table.owner}"', remedy
    if not table.uses_schema:
        schema, role = sql_identifier(table.schema), sql_identifier(table.acting)
        return (
            f'role "{table.acting}", as which changes are applied, may not use schema "{table.schema}"',
            on_target(f"GRANT USAGE ON SCHEMA {schema} TO {role};"),
        )
    if table.lacks:
        grant = (
            f"GRANT {', '.join(table.lacks)} ON {sql_name(table.schema, table.name)} TO {sql_identifier(table.acting)};"
        )
        return f'role "{table.acting}", as which changes are applied, lacks {", ".join(table.lacks)}', on_target(grant)
    return None


def _apply_role(facts: Facts) -> Remedy | None:
    if facts.target_roles is None:
        return None
    return run(" ".join(apply_statements(facts.target_roles)) + " -- and give that role to --apply-target")


def encoding_findings(publisher: PublisherFacts, target: TargetFacts) -> Iterator[Finding]:
    if publisher.encoding == target.encoding:
        yield Finding(Level.OK, "target", f"both databases are in {target.encoding}")
    elif "SQL_ASCII" in (publisher.encoding, target.encoding):
        message = f"the publisher is in {publisher.encoding}, the target in {target.encoding}: text is not converted"
        yield Finding(
            Level.WARNING, "target", message, Remedy("Create the target database in the publisher's encoding.")
        )
    else:
        message = (
            f"the publisher is in {publisher.encoding}, the target in {target.encoding}: "
            "a character that the target does not have stops the subscription"
        )
        fix = None if target.encoding == "UTF8" else Remedy("Create the target database with ENCODING 'UTF8'.")
        level = Level.OK if target.encoding == "UTF8" else Level.WARNING
        yield Finding(level, "target", message if fix else "text is converted to UTF8", fix)


# --- two_phase ------------------------------------------------------------------------------------


def two_phase_findings(facts: Facts) -> Iterator[Finding]:
    """Return findings about a subscription that has two_phase, or is to have it."""
    publisher, target = facts.publisher, facts.target
    if publisher is not None and not OPTIONS["two_phase"].is_supported_by(publisher.version):
        message = f"PostgreSQL {publisher.version_text} does not send prepared transactions until they are committed"
        yield Finding(
            Level.WARNING,
            "publisher",
            message,
            Remedy(f"Leave two_phase = false, or upgrade it to {OPTIONS['two_phase'].since} or later."),
        )
    slot = facts.slot
    if facts.two_phase is TwoPhaseState.ENABLED and slot is not None and slot.exists and not slot.two_phase:
        message = f'replication slot "{slot.name}" has two_phase off, but the subscription has it on'
        fix = Remedy("ALTER SUBSCRIPTION … DISABLE; ALTER SUBSCRIPTION … SET (two_phase = true); then ENABLE it.")
        yield Finding(Level.WARNING, "publisher", message, fix)
    if target is None:
        return
    there = publisher.max_prepared if publisher is not None else PREPARED
    setting = "max_prepared_transactions"
    fix = run(f"ALTER SYSTEM SET {setting} = {there or PREPARED}; -- and restart the server")
    if target.max_prepared == 0:
        message = f"{setting} is 0: the first prepared transaction will stop the subscription"
        yield Finding(Level.ERROR, "target", message, fix)
    elif target.max_prepared < there:
        message = f"{setting} is {target.max_prepared}, but {there} on the publisher: more may wait there than fit here"
        yield Finding(Level.WARNING, "target", message, fix)
    else:
        yield Finding(Level.OK, "target", f"{setting} is {target.max_prepared}")


# --- tables ---------------------------------------------------------------------------------------


def table_findings(source: CheckedSourceTable, target: CheckedTargetTable | None, facts: Facts) -> Iterator[Finding]:
    who = f"table {source.schema}.{source.name}"
    problems = [*_source_table(source, facts), *_target_table(source, target, facts)]
    for level, message, fix in problems:
        yield Finding(level, who, message, fix)
    if not problems:
        yield Finding(Level.OK, who, f"has its {len(source.columns)} columns on both sides")


Problem = tuple[Level, str, Remedy | None]


def _source_table(source: CheckedSourceTable, facts: Facts) -> Iterator[Problem]:
    name = sql_name(source.schema, source.name)
    changes = [kind for kind in ("update", "delete") if any(getattr(p, f"{kind}s") for p in facts.publications)]
    what = " and ".join(kind.upper() for kind in changes) + (" fails" if len(changes) == 1 else " fail")
    if not source.readable and facts.publisher is not None:
        yield (
            Level.ERROR,
            f'role "{facts.publisher.role}" may not read it for the initial copy',
            on_publisher(grant_read([(source.schema, source.name)], facts.publisher.role)),
        )
    if source.closed_partitions and facts.publisher is not None:
        yield (
            Level.WARNING,
            f'role "{facts.publisher.role}" may not read {formatting.count(len(source.closed_partitions), "partition")}'
            " of it: verify, repair and copies by ranges read each partition",
            on_publisher(grant_read(source.closed_partitions, facts.publisher.role)),
        )
    if source.row_security and facts.publisher is not None:
        role = sql_identifier(facts.publisher.role)
        yield (
            Level.WARNING,
            f'row security applies to role "{facts.publisher.role}": the initial copy leaves out the rows that policies'
            " hide from it, without an error",
            on_publisher(f"ALTER ROLE {role} BYPASSRLS;"),
        )
    if not changes or source.partitioned:  # of a partitioned table, each partition has its own
        return
    fix = Remedy(
        f"on the publisher: ALTER TABLE {name} ADD PRIMARY KEY (…); -- or: ALTER TABLE {name} REPLICA IDENTITY FULL;"
    )
    if source.replica_identity == "n":
        yield Level.WARNING, f"has REPLICA IDENTITY NOTHING: {what} on the publisher", fix
    elif source.replica_identity == "f":
        return
    elif not source.key:
        yield Level.WARNING, f"has no replica identity: {what} on the publisher", fix


def _target_table(source: CheckedSourceTable, target: CheckedTargetTable | None, facts: Facts) -> Iterator[Problem]:
    name = sql_name(source.schema, source.name)
    if target is None:
        if facts.target is not None:
            yield Level.ERROR, "does not exist on the target", _missing_table(source.schema, source.name, facts)
        return
    if target.relkind not in ("r", "p"):
        yield Level.ERROR, "is not a table on the target", Remedy(f"Make {name} a table there.")
        return
    yield from _columns(source, target, name)
    if facts.target is not None and not facts.target.is_superuser:
        yield from _privileges(source, target, facts)
    if target.row_security:
        fix = on_target(f"ALTER TABLE {name} NO FORCE ROW LEVEL SECURITY;")
        yield Level.ERROR, "has row-level security that also applies to its owner, as which changes are applied", fix
    yield from _search(source, target, name, facts)
    if target.writers:
        rule = sql_literal(f"{name}: …")
        statement = f"SUBSCRIPTION … WITH (source_tag = {rule})" if facts.is_new else f"SET (source_tag = {rule})"
        verb = "CREATE" if facts.is_new else f"ALTER SUBSCRIPTION {sql_identifier(facts.subscription or '')}"
        yield (
            Level.WARNING,
            f"may have rows of other subscriptions: {', '.join(target.writers)}; without rules of ownership, a TRUNCATE"
            " of one publisher deletes the rows of all, and a repair keeps all extra rows",
            Remedy(f"Give each of them a rule: {verb} {statement}"),
        )
    elif target.has_rows and facts.is_new:
        fix = on_target(f"TRUNCATE {name}; -- or: CREATE SUBSCRIPTION … WITH (copy_data = false)")
        yield Level.WARNING, "already has rows on the target, to which the initial copy adds", fix


def _missing_table(schema: str, name: str, facts: Facts) -> Remedy:
    """Return how to create a table on the target, with an owner whom the apply role acts as."""
    assert facts.target is not None
    owner = None if facts.target_roles is None else facts.target_roles.application_owners.get(schema)
    if facts.target.is_superuser:
        return run(table_dump(schema, name, owner))
    advice = "with connection strings of administrators in SOURCE and TARGET"
    return Remedy(advice, table_dump(schema, name, owner, own_dsns=False))


def _columns(source: CheckedSourceTable, target: CheckedTargetTable, name: str) -> Iterator[Problem]:
    here = {column.name: column for column in target.columns}
    for column in source.columns:
        other = here.pop(column.name, None)
        quoted = sql_identifier(column.name)
        if other is None:
            kind = sql_type(column.type)
            add = on_target(f"ALTER TABLE {name} ADD COLUMN {quoted} {kind};")
            fix = add if kind else Remedy("Add it, with the publisher's type.")
            yield Level.ERROR, f'column "{column.name}" is missing on the target', fix
        elif other.is_generated:
            fix = on_target(f"ALTER TABLE {name} ALTER COLUMN {quoted} DROP EXPRESSION;")
            yield Level.ERROR, f'column "{column.name}" is published, but generated on the target', fix
        elif other.type != column.type:
            message = f'column "{column.name}" is {column.type} on the publisher and {other.type} on the target'
            kind = sql_type(column.type)
            alter = on_target(f"ALTER TABLE {name} ALTER COLUMN {quoted} TYPE {kind};")
            fix = alter if kind else Remedy("Give it the publisher's type.")
            yield Level.WARNING, f"{message}: values go through text, and binary = true does not work", fix
    for column in here.values():
        if column.is_required and not column.is_generated:
            fix = on_target(
                f"ALTER TABLE {name} ALTER COLUMN {sql_identifier(column.name)} DROP NOT NULL; -- or SET DEFAULT …"
            )
            yield Level.ERROR, f'column "{column.name}" is only on the target, NOT NULL and without default', fix


def _privileges(source: CheckedSourceTable, target: CheckedTargetTable, facts: Facts) -> Iterator[Problem]:
    assert facts.target is not None
    if not target.uses_schema:
        schema, role = sql_identifier(source.schema), sql_identifier(facts.target.role)
        message = f'role "{facts.target.role}" may not use its schema on the target, and finds no table there'
        fix = on_target(f"GRANT USAGE ON SCHEMA {schema} TO {role};")
        yield Level.ERROR if facts.is_new else Level.WARNING, message, fix
    tables = () if facts.apply is None else facts.apply.tables
    reported = any(
        (table.schema, table.name) == (source.schema, source.name) and not (table.may_act and table.owner_may_act)
        for table in tables
    )
    if not target.may_act_as_owner and not reported:  # apply_findings() names the roles that apply changes
        remedy = _owner_remedy(source.schema, source.name, target.owner, facts)
        yield Level.ERROR, f'role "{facts.target.role}" may not act as its owner on the target', remedy


def _owner_remedy(schema: str, name: str, owner: str, facts: Facts) -> Remedy | None:
    roles = facts.target_roles
    if roles is None:
        return None
    is_superuser = any(table.owner == owner and table.owner_is_superuser for table in roles.tables)
    return act_as_remedy(roles, OwnedTable(schema, name, owner, is_superuser))


def _search(source: CheckedSourceTable, target: CheckedTargetTable, name: str, facts: Facts) -> Iterator[Problem]:
    """Check that the rows to update or delete can be found. The target table's own identity decides how."""
    changes = any(p.updates or p.deletes for p in facts.publications)
    full = source.replica_identity == "f"
    if not changes or source.partitioned or not (full or source.key):
        return
    key = ", ".join(sql_identifier(column) for column in source.key)
    published = {column.name for column in source.columns} if full else set(source.key)
    index = on_target(f"CREATE UNIQUE INDEX i ON {name} ({key}); ALTER TABLE {name} REPLICA IDENTITY USING INDEX i;")
    if target.deferrable and not target.key and not full:
        message = "has a DEFERRABLE primary key on the target: an UPDATE or DELETE will stop the subscription"
        yield Level.ERROR, message, index
    elif not target.key and full:
        fix = Remedy(f"on the target: ALTER TABLE {name} ADD PRIMARY KEY (…);")
        yield Level.WARNING, "is under REPLICA IDENTITY FULL and has no key: each change may search it all", fix
    elif not target.key:
        fix = on_target(f"ALTER TABLE {name} ADD PRIMARY KEY ({key});")
        yield Level.ERROR, "has no primary key on the target: an UPDATE or DELETE will stop the subscription", fix
    elif missing := [column for column in target.key if column not in published]:
        message = f'is identified by "{missing[0]}" on the target, which the publisher does not send as key'
        yield Level.ERROR, message, index
