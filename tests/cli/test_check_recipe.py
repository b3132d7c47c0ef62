"""The recipe of least privilege as text. tests/privileges/recipe/test_recipe.py runs it."""

from __future__ import annotations

import base64
import hmac
from dataclasses import replace

import pytest

from subscriber.check.recipe import (
    OwnedSubscription,
    OwnedTable,
    PublishedTableAccess,
    PublisherRoles,
    RecipeSide,
    TargetRoles,
    apply_statements,
    write_recipe,
)
from subscriber.cli.recipe_output import connection_string, script
from subscriber.connection.scram import new_password, scram_verifier

TABLE = OwnedTable("s", "t", "app", False, everybody_uses_schema=True)
TARGET = TargetRoles(
    180000, "18.0", "db", "subscriber_launcher", "subscriber_apply", frozenset(), frozenset(), True, True, True, 0,
    tables=(TABLE,),
)  # fmt: skip
PUBLISHER = PublisherRoles(
    "18.0", "db", "repl", False, False, None, True, (PublishedTableAccess("s", "t", True, False),)
)
MINE = OwnedSubscription("s", "subscriber_launcher", False, False, True)


def statements(target: TargetRoles) -> list[str]:
    return [statement for step in write_recipe(target, None).steps for statement in step.statements]


def notes(target: TargetRoles | None = None, publisher: PublisherRoles | None = None) -> str:
    return "\n".join(text for _, text in write_recipe(target, publisher).notes)


def test_a_target_where_everything_is_ready() -> None:
    ready = replace(
        TARGET, roles=frozenset({TARGET.launcher, TARGET.apply}), logins=frozenset({TARGET.launcher, TARGET.apply})
    )
    assert statements(replace(ready, is_new=False, subscriptions=(MINE,))) == [
        "SELECT subscriber.admit('subscriber_launcher', 'launcher');",
        "SELECT subscriber.admit('subscriber_apply', 'apply');",
        'GRANT "subscriber_apply" TO "subscriber_launcher" WITH INHERIT TRUE, SET TRUE;',
        'GRANT "app" TO "subscriber_apply" WITH INHERIT FALSE, SET TRUE;',
    ]


def test_the_recipe_for_targets_before_16_has_no_pg_create_subscription() -> None:
    old = statements(replace(TARGET, version=150000))
    assert 'CREATE ROLE "subscriber_apply" LOGIN NOINHERIT;' in old
    assert 'CREATE ROLE "subscriber_launcher" LOGIN;' in old
    assert 'GRANT "app" TO "subscriber_apply";' in old
    assert not any("pg_create_subscription" in statement for statement in old)
    assert "before PostgreSQL 16 a superuser creates subscriptions" in notes(replace(TARGET, version=150000))


def test_the_apply_role_gets_no_reserved_connection() -> None:
    """Membership in that role would be more than owners of tables have."""
    texts = [s for s in statements(replace(TARGET, reserved_connections=3)) if "reserved" in s]
    assert texts == ['GRANT pg_use_reserved_connections TO "subscriber_launcher";']


@pytest.mark.parametrize(
    ("subscription", "expected"),
    [
        (replace(MINE, owner="other"), 'GRANT "other" TO "subscriber_launcher" WITH INHERIT TRUE, SET FALSE;'),
        (replace(MINE, run_as_owner=True), 'GRANT "app" TO "subscriber_apply" WITH INHERIT TRUE, SET TRUE;'),
    ],
)
def test_owners_of_subscriptions(subscription: OwnedSubscription, expected: str) -> None:
    texts = statements(replace(TARGET, is_new=False, subscriptions=(subscription,)))
    assert [statement for statement in texts if statement.startswith(expected)]


def test_the_notes_name_the_decisions_of_the_operator() -> None:
    tables = (replace(TABLE, code_of=("app",)), OwnedTable("s", "u", "other", False), OwnedTable("s", "v", "dba", True))
    subscriptions = (replace(MINE, owner="dba", owner_is_superuser=True, has_password=False),)
    lines = notes(replace(TARGET, tables=tables, subscriptions=subscriptions))
    assert 'table "s"."v" belongs to superuser "dba"' in lines
    assert 'connection string of subscription "s" needs a password' in lines
    assert "trusted_owners = 'app'" in lines
    trusted = (replace(subscriptions[0], trusted_owners=("app",)),)
    assert "trusted_owners" not in notes(replace(TARGET, tables=tables, subscriptions=trusted))


def test_the_statements_for_the_apply_role_alone() -> None:
    assert apply_statements(TARGET) == [
        'CREATE ROLE "subscriber_apply" LOGIN;',
        "SELECT subscriber.admit('subscriber_apply', 'apply');",
        'GRANT "app" TO "subscriber_apply" WITH INHERIT FALSE, SET TRUE;',
    ]


def test_the_recipe_for_a_publisher_creates_and_grants_its_role() -> None:
    def of(facts: PublisherRoles) -> list[str]:
        return [statement for step in write_recipe(None, facts).steps for statement in step.statements]

    assert of(PUBLISHER) == [
        'CREATE ROLE "repl" LOGIN;',
        'ALTER ROLE "repl" REPLICATION;',
        'GRANT SELECT ON TABLE "s"."t" TO "repl";',
    ]
    assert 'GRANT "rds_replication" TO "repl";' in of(replace(PUBLISHER, replication_role="rds_replication"))
    secured = replace(PUBLISHER, tables=(PublishedTableAccess("s", "t", False, True),))
    assert 'GRANT USAGE ON SCHEMA "s" TO "repl";' in of(secured)
    assert "row-level security" in notes(None, secured)


def test_names_cannot_leave_their_line() -> None:
    hostile = 'x"; DROP TABLE y; --\n\\! id'
    facts = replace(TARGET, database=hostile, tables=(OwnedTable(hostile, hostile, hostile, False),))
    lines = script(write_recipe(facts, None), RecipeSide.TARGET).splitlines()
    assert [line for line in lines if line.startswith("\\") and not line.startswith("\\password ")] == []
    assert [line for line in lines if line.startswith("DROP")] == []


def test_a_verifier_is_that_of_rfc_7677() -> None:
    """Its server key signs the example of section 3 as the server does there."""
    nonce = "rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
    salt = "W22ZaJ0SNY7soEsUEjb6gQ=="
    message = f"n=user,r=rOprNGfwEbeRWgbNEkqO,r={nonce},s={salt},i=4096,c=biws,r={nonce}"
    verifier = scram_verifier("pencil", salt=base64.b64decode(salt))
    assert verifier.startswith(f"SCRAM-SHA-256$4096:{salt}$")
    server_key = base64.b64decode(verifier.rpartition(":")[2])
    signature = base64.b64encode(hmac.digest(server_key, message.encode(), "sha256")).decode()
    assert signature == "6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
    with pytest.raises(ValueError, match="ASCII"):
        scram_verifier("pässword")
    assert len({new_password() for _ in range(100)}) == 100


def test_a_connection_string_for_another_role() -> None:
    given = "postgresql://admin:secret@a.example:5433/db?sslmode=verify-full&sslcert=mine.crt&sslkey=mine.key"
    assert connection_string(given, "db", "role", "word") == (
        "user=role password=word host=a.example port=5433 dbname=db sslmode=verify-full"
    )
