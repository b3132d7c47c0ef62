"""The least privileges that replication needs, as statements for both servers. No I/O here.

**Purpose.** Replication uses three roles, none of them a superuser:

    launcher    runs and owns the subscriptions; reads the publisher's password and applies no changes
    apply       applies changes; may act as the owners of the tables, with no more rights than theirs
    publisher   reads the publisher's tables and its WAL

**Invariants.** The recipe can run again: it creates missing roles and grants missing privileges. Each step names the
consequence of leaving it out. No statement contains a password.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from subscriber import server_features as features
from subscriber.display import sql_identifier, sql_literal, sql_name
from subscriber.remedy import Remedy, on_target
from subscriber.targets.postgres.session.capabilities import WITHOUT_ORIGINS, WITHOUT_REPLICA_ROLE

LAUNCHER, APPLY, PUBLISHER = "subscriber_launcher", "subscriber_apply", "subscriber_publisher"


class RecipeSide(StrEnum):
    TARGET = "target"
    PUBLISHER = "publisher"


@dataclass(frozen=True, slots=True)
class RecipeStep:
    """One step of the recipe. Its parts run in the order of the fields, on the server `side`."""

    side: RecipeSide
    key: str  # the subject of the step, in a few words
    what: str  # a sentence
    without: str  # the consequence of leaving the step out
    exec: str | None = None  # for `subscriber exec`; empty text creates schema "subscriber"
    statements: tuple[str, ...] = ()
    password_of: str | None = None  # a role that gets a password


@dataclass(frozen=True, slots=True)
class OwnedTable:
    """A subscribed table or sequence of the target."""

    schema: str
    name: str
    owner: str
    owner_is_superuser: bool
    everybody_uses_schema: bool = False  # PUBLIC has USAGE
    code_of: tuple[str, ...] = ()  # roles, except superusers, whose code the table's changes run
    is_sequence: bool = False


@dataclass(frozen=True, slots=True)
class OwnedSubscription:
    name: str
    owner: str
    owner_is_superuser: bool
    run_as_owner: bool
    has_password: bool  # its connection string has a password
    trusted_owners: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TargetRoles:
    """The facts about the target that the recipe needs."""

    version: int  # server_version_num
    version_text: str
    database: str
    launcher: str
    apply: str
    roles: frozenset[str]  # those of the two roles that exist
    logins: frozenset[str]  # those of `roles` that may log in
    has_schema: bool  # schema "subscriber" exists, at the newest revision
    schema_by_superuser: bool  # it belongs to a superuser, or will
    everybody_connects: bool  # PUBLIC has CONNECT on the database
    reserved_connections: int  # the setting; 0 on servers without it
    subscriptions: tuple[OwnedSubscription, ...] = ()
    tables: tuple[OwnedTable, ...] = ()
    is_new: bool = True  # the subscription does not exist yet
    launcher_creates: bool = False  # the launcher's role may already create it
    application_owners: Mapping[str, str] = field(default_factory=dict)  # who owns the tables of a schema, or would


@dataclass(frozen=True, slots=True)
class PublishedTableAccess:
    """A published table, a partition of one, or a sequence that is synchronized."""

    schema: str
    name: str
    everybody_uses_schema: bool
    row_security: bool = False
    is_sequence: bool = False


@dataclass(frozen=True, slots=True)
class PublisherRoles:
    """The facts about the publisher that the recipe needs."""

    version_text: str
    database: str
    role: str
    role_exists: bool
    role_may_login: bool
    replication_role: str | None  # the role of a managed service that replaces the attribute REPLICATION
    everybody_connects: bool
    tables: tuple[PublishedTableAccess, ...] = ()


@dataclass(slots=True)
class Recipe:
    """The steps in execution order, and notes for the parts that have no statement.

    None: that server did not answer.
    """

    target: TargetRoles | None = None
    publisher: PublisherRoles | None = None
    steps: list[RecipeStep] = field(default_factory=list)
    notes: list[tuple[RecipeSide, str]] = field(default_factory=list)


def write_recipe(target: TargetRoles | None, publisher: PublisherRoles | None) -> Recipe:
    """Return the whole recipe for the servers' current state."""
    recipe = Recipe(target, publisher)
    if target is not None:
        recipe.steps += target_steps(target)
        recipe.notes += ((RecipeSide.TARGET, note) for note in target_notes(target))
    if publisher is not None:
        recipe.steps += publisher_steps(publisher)
        recipe.notes += ((RecipeSide.PUBLISHER, note) for note in publisher_notes(publisher))
    return recipe


# --- the target -----------------------------------------------------------------------------------


def target_steps(facts: TargetRoles) -> Iterator[RecipeStep]:
    """Yield the steps for the target, in execution order."""
    launcher, apply = sql_identifier(facts.launcher), sql_identifier(facts.apply)
    if not facts.has_schema:
        yield _on_target(
            "schema",
            "Schema subscriber with its functions, which belong to the role that runs this.",
            'the next steps fail: schema "subscriber" does not exist',
            exec="",
        )
    inherits = features.MEMBERSHIP_OPTIONS.is_in(facts.version) or _applies_itself(facts)
    attributes = "" if inherits else " NOINHERIT"
    for key, what, role, more in (
        ("launcher", "The role of the launcher.", facts.launcher, ""),
        ("apply", "The role that applies changes.", facts.apply, attributes),
    ):
        if role not in facts.logins:
            yield _login(RecipeSide.TARGET, key, what, role, role in facts.roles, more)
    if not facts.everybody_connects:
        yield _connect(RecipeSide.TARGET, facts.database, f"{launcher}, {apply}")
    yield _admit("launcher", facts.launcher, "permission denied to run subscriptions on this database")
    yield _admit("apply", facts.apply, "permission denied for function register_own_session")
    yield _on_target(
        "launcher as apply",
        "The owner of the subscriptions may act as the owners of tables, and ends sessions of the apply role.",
        f'role "{facts.launcher}" cannot SET ROLE to the owner of a table; permission denied to terminate process',
        statements=(_grant(facts, facts.apply, facts.launcher, inherit=True),),
    )
    yield from _creation(facts)
    yield from _ownership(facts)
    for owner in _acted_as(facts):
        yield _on_target(
            f"apply as {owner}",
            f"Tables and sequences of role {sql_identifier(owner)} are read, changed and set as that role.",
            f'role "{facts.launcher}" cannot SET ROLE to "{owner}"',
            statements=(_grant(facts, owner, facts.apply, inherit=_applies_itself(facts)),),
        )
    schemas = sorted({table.schema for table in facts.tables if not table.everybody_uses_schema})
    if schemas:
        names = ", ".join(sql_identifier(schema) for schema in schemas)
        yield _on_target(
            "schemas",
            "The owner of the subscriptions finds tables in these schemas. The apply role finds them as their owner.",
            f"permission denied for schema {schemas[0]}: no subscription is created or refreshed",
            statements=(f"GRANT USAGE ON SCHEMA {names} TO {launcher};",),
        )
    if facts.reserved_connections:
        yield _on_target(
            "reserved connections",
            "The launcher uses connections that the server reserves. The apply role does not: it would exceed owners.",
            "remaining connection slots are reserved: the launcher does not connect to a full server",
            statements=(f"GRANT pg_use_reserved_connections TO {launcher};",),
        )


def _creation(facts: TargetRoles) -> Iterator[RecipeStep]:
    if not facts.is_new or not features.CREATE_SUBSCRIPTION_ROLE.is_in(facts.version) or facts.launcher_creates:
        return
    launcher = sql_identifier(facts.launcher)
    yield _on_target(
        "creation",
        "The launcher creates subscriptions.",
        "permission denied to create subscription",
        statements=(f"GRANT pg_create_subscription TO {launcher};",),
    )
    yield _on_target(
        "database",
        "A role that creates subscriptions needs CREATE on the database, as in PostgreSQL.",
        f"permission denied for database {facts.database}",
        statements=(f"GRANT CREATE ON DATABASE {sql_identifier(facts.database)} TO {launcher};",),
    )


def _ownership(facts: TargetRoles) -> Iterator[RecipeStep]:
    """Yield the steps that let the launcher run subscriptions: it must own them, or inherit from their owner."""
    inherited = {facts.launcher, facts.apply}
    for subscription in facts.subscriptions:
        if _becomes_applied_as(facts, subscription):
            name, role = sql_identifier(subscription.name), sql_identifier(facts.apply)
            yield _on_target(
                f"owner of {subscription.name}",
                f"Subscription {name} has run_as_owner. The role that applies changes takes it over.",
                f'permission denied to set role "{subscription.owner}"',
                statements=() if features.MEMBERSHIP_OPTIONS.is_in(facts.version) else (f"ALTER ROLE {role} INHERIT;",),
                exec=f"ALTER SUBSCRIPTION {name} OWNER TO {role}",
            )
        elif subscription.owner_is_superuser:
            name, role = sql_identifier(subscription.name), sql_identifier(facts.launcher)
            yield _on_target(
                f"owner of {subscription.name}",
                f"Subscription {name} belongs to a superuser. The launcher takes it over.",
                "the launcher does not see the subscription",
                exec=f"ALTER SUBSCRIPTION {name} OWNER TO {role}",
            )
        elif subscription.owner not in inherited:
            inherited.add(subscription.owner)
            yield _on_target(
                f"subscriptions of {subscription.owner}",
                f"The launcher runs the subscriptions of role {sql_identifier(subscription.owner)}.",
                "the launcher does not see the subscription",
                statements=(_grant(facts, subscription.owner, facts.launcher, inherit=True, set_role=False),),
            )


def _becomes_applied_as(facts: TargetRoles, subscription: OwnedSubscription) -> bool:
    """Return True if the apply role takes the subscription over: it acts as the owner, and not as the launcher."""
    return subscription.run_as_owner and (subscription.owner_is_superuser or subscription.owner == facts.launcher)


def _applies_itself(facts: TargetRoles) -> bool:
    """Return True if the apply role itself changes tables, with the privileges of their owners."""
    return any(
        _becomes_applied_as(facts, subscription) or (subscription.run_as_owner and subscription.owner == facts.apply)
        for subscription in facts.subscriptions
    )


def table_owners(facts: TargetRoles) -> list[str]:
    """Return the owners of the tables, except superusers."""
    return sorted({table.owner for table in facts.tables if not table.owner_is_superuser} - {facts.launcher})


def _acted_as(facts: TargetRoles) -> list[str]:
    """Return the roles that the apply role has to act as."""
    as_owners = not facts.subscriptions or facts.is_new or any(not s.run_as_owner for s in facts.subscriptions)
    owners = set(table_owners(facts)) if as_owners or _applies_itself(facts) else set()
    owners |= {
        subscription.owner
        for subscription in facts.subscriptions
        if subscription.run_as_owner and not _becomes_applied_as(facts, subscription)
    }
    return sorted(owners - {facts.apply})


def owner_statements(facts: TargetRoles, owner: str) -> list[str]:
    """Return the statements that let the roles of a subscription act as the owner of a table."""
    if facts.apply not in facts.roles:  # one role runs the subscriptions and applies changes
        return [_grant(facts, owner, facts.launcher)]
    statements = [_grant(facts, owner, facts.apply)]
    if facts.launcher in facts.roles:
        statements.append(_grant(facts, facts.apply, facts.launcher, inherit=True))
    return statements


def act_as_remedy(facts: TargetRoles, table: OwnedTable) -> Remedy:
    """Return how the roles of a subscription may act as the owner of a table. No role becomes a superuser's member."""
    if not table.owner_is_superuser:
        return on_target(" ".join(owner_statements(facts, table.owner)))
    advice = (
        "its owner is a superuser, whom no role of a subscription acts as. Give it to an application's role, on the"
        " target"
    )
    statement = f"ALTER {'SEQUENCE' if table.is_sequence else 'TABLE'} {sql_name(table.schema, table.name)} OWNER TO"
    if (other := facts.application_owners.get(table.schema)) is None:
        return Remedy(f"{advice}: {statement} …;")
    return Remedy(advice, f"{statement} {sql_identifier(other)};")


def target_notes(facts: TargetRoles) -> Iterator[str]:
    """Yield notes about decisions to make, and about steps that have no statement."""
    launcher = sql_identifier(facts.launcher)
    yield (
        "pg_hba.conf lets both roles connect with a password: "
        f"host {sql_identifier(facts.database)} {launcher},{sql_identifier(facts.apply)} ADDRESS scram-sha-256"
    )
    if facts.is_new and not features.CREATE_SUBSCRIPTION_ROLE.is_in(facts.version) and facts.schema_by_superuser:
        yield (
            "before PostgreSQL 16 a superuser creates subscriptions: CREATE SUBSCRIPTION … WITH (enabled = false); "
            f"ALTER SUBSCRIPTION … OWNER TO {launcher}; ALTER SUBSCRIPTION … ENABLE;"
        )
    for table in facts.tables:
        if table.owner_is_superuser:
            kind = "sequence" if table.is_sequence else "table"
            yield (
                f"{kind} {sql_name(table.schema, table.name)} belongs to superuser {sql_identifier(table.owner)}, whom "
                f"the apply role cannot act as: ALTER {kind.upper()} … OWNER TO a role of its own"
            )
    for subscription in facts.subscriptions:
        if subscription.owner_is_superuser and not subscription.has_password:
            yield (
                f"the connection string of subscription {sql_identifier(subscription.name)} needs a password, as its "
                "owner is no superuser any more: ALTER SUBSCRIPTION … CONNECTION"
            )
    if not facts.schema_by_superuser:
        yield f"schema subscriber does not belong to a superuser: {WITHOUT_ORIGINS}"
        if not features.GRANT_SET.is_in(facts.version):
            yield f"before PostgreSQL 15 this privilege cannot be granted: {WITHOUT_REPLICA_ROLE}"
        else:
            grant = f"GRANT SET ON PARAMETER session_replication_role TO {sql_identifier(facts.apply)};"
            yield f"a superuser grants this: {grant} Without it: {WITHOUT_REPLICA_ROLE}"
    owners = _acted_as(facts)
    trusted = {owner for subscription in facts.subscriptions for owner in subscription.trusted_owners}
    code_of = sorted({owner for table in facts.tables for owner in table.code_of} - trusted - {facts.apply})
    if len(owners) > 1 and code_of:
        names = ", ".join(sql_identifier(owner) for owner in code_of)
        yield (
            f"the apply role acts as several owners, so tables that run code of {names} are refused: let one role own "
            "all tables, or trust the owners: ALTER SUBSCRIPTION … SET (trusted_owners = "
            f"{sql_literal(', '.join(code_of))})"
        )


def apply_statements(facts: TargetRoles) -> list[str]:
    """Return the statements that set up the role that applies changes."""
    keys = {"apply", "admit apply", *(f"apply as {owner}" for owner in _acted_as(facts))}
    return [statement for step in target_steps(facts) if step.key in keys for statement in step.statements]


# --- the publisher --------------------------------------------------------------------------------


def publisher_steps(facts: PublisherRoles) -> Iterator[RecipeStep]:
    """Yield the steps for the publisher, in execution order."""
    role = sql_identifier(facts.role)
    if not facts.role_may_login:
        yield _login(
            RecipeSide.PUBLISHER, "role", "The role of the subscriptions' connections.", facts.role, facts.role_exists
        )
    managed = facts.replication_role
    yield RecipeStep(
        RecipeSide.PUBLISHER,
        "replication",
        "The role reads the WAL, and creates and drops replication slots.",
        "could not connect to the publisher: no walsender starts for the role",
        statements=(f"GRANT {sql_identifier(managed)} TO {role};" if managed else f"ALTER ROLE {role} REPLICATION;",),
    )
    if not facts.everybody_connects:
        yield _connect(RecipeSide.PUBLISHER, facts.database, role)
    schemas = sorted({table.schema for table in facts.tables if not table.everybody_uses_schema})
    if schemas:
        names = ", ".join(sql_identifier(schema) for schema in schemas)
        yield RecipeStep(
            RecipeSide.PUBLISHER,
            "schemas",
            "The role reads tables and sequences of these schemas.",
            f"permission denied for schema {schemas[0]}: no table is copied",
            statements=(f"GRANT USAGE ON SCHEMA {names} TO {role};",),
        )
    if tables := [table for table in facts.tables if not table.is_sequence]:
        names = ", ".join(sql_name(table.schema, table.name) for table in tables)
        yield RecipeStep(
            RecipeSide.PUBLISHER,
            "tables",
            "The role reads the published tables and their partitions, to copy and to compare them. Changes need no"
            " privilege.",
            f"permission denied for table {tables[0].name}: no table is copied",
            statements=(f"GRANT SELECT ON TABLE {names} TO {role};",),
        )
    if sequences := [table for table in facts.tables if table.is_sequence]:
        names = ", ".join(sql_name(sequence.schema, sequence.name) for sequence in sequences)
        yield RecipeStep(
            RecipeSide.PUBLISHER,
            "sequences",
            "The role reads the sequences that are synchronized.",
            f'insufficient privileges on publisher sequence ("{sequences[0].schema}.{sequences[0].name}")',
            statements=(f"GRANT SELECT ON SEQUENCE {names} TO {role};",),
        )


def publisher_notes(facts: PublisherRoles) -> Iterator[str]:
    """Yield notes about decisions to make, and about steps that have no statement."""
    role, database = sql_identifier(facts.role), sql_identifier(facts.database)
    yield f"pg_hba.conf requires the password: host {database} {role} ADDRESS scram-sha-256"
    for table in facts.tables:
        if table.row_security:
            yield (
                f"table {sql_name(table.schema, table.name)} has row-level security, which also filters its copy: "
                f"create a policy for {role}, or ALTER ROLE {role} BYPASSRLS"
            )


# --- parts ----------------------------------------------------------------------------------------


def _on_target(
    key: str, what: str, without: str, *, exec: str | None = None, statements: Sequence[str] = ()
) -> RecipeStep:
    return RecipeStep(RecipeSide.TARGET, key, what, without, exec, tuple(statements))


def _login(side: RecipeSide, key: str, what: str, role: str, exists: bool, attributes: str = "") -> RecipeStep:
    verb = "ALTER" if exists else "CREATE"
    return RecipeStep(
        side,
        key,
        what,
        f'role "{role}" is not permitted to log in' if exists else f'role "{role}" does not exist',
        statements=(f"{verb} ROLE {sql_identifier(role)} LOGIN{attributes};",),
        password_of=None if exists else role,
    )


def _connect(side: RecipeSide, database: str, roles: str) -> RecipeStep:
    return RecipeStep(
        side,
        "connect",
        "On this database PUBLIC does not have CONNECT.",
        f'permission denied for database "{database}"',
        statements=(f"GRANT CONNECT ON DATABASE {sql_identifier(database)} TO {roles};",),
    )


def _admit(duty: str, role: str, without: str) -> RecipeStep:
    return _on_target(
        f"admit {duty}",
        f"Duty {duty}: the functions and tables of schema subscriber that it needs.",
        without,
        statements=(f"SELECT subscriber.admit({sql_literal(role)}, {sql_literal(duty)});",),
    )


def _grant(facts: TargetRoles, role: str, member: str, *, inherit: bool = False, set_role: bool = True) -> str:
    options = f" WITH INHERIT {str(inherit).upper()}, SET {str(set_role).upper()}"
    with_options = options if features.MEMBERSHIP_OPTIONS.is_in(facts.version) else ""
    return f"GRANT {sql_identifier(role)} TO {sql_identifier(member)}{with_options};"
