"""Reasons why `subscriber adopt` cannot take over a subscription of pglogical exactly. Nothing is changed here.

A subscription of ours is exact if it gets the same changes, and resolves conflicts in the same way. So the publications
have the tables, columns and actions of the replication sets, and a conflict_policy has the meaning of
pglogical.conflict_resolution.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import asyncpg

from subscriber import server_features as features
from subscriber.catalog import pglogical_subscription
from subscriber.catalog.commands import handover
from subscriber.catalog.commands.handover import Obstacle
from subscriber.catalog.pglogical_subscription import PglogicalSubscription
from subscriber.display import shell_word, sql_identifier, sql_literal, sql_name
from subscriber.publisher import pglogical
from subscriber.publisher.connection import Publisher
from subscriber.publisher.pglogical import ACTIONS, Entry

# pglogical.conflict_resolution -> the policy for a row that exists, and for one that another origin has written.
# pglogical skips changes of missing rows, as PostgreSQL does. It detects the second conflict only with
# track_commit_timestamp, and never for a DELETE.
_POLICIES = {
    "error": ("", "update_origin_differs: error"),
    "apply_remote": ("insert_exists: apply_remote", ""),
    "keep_local": ("insert_exists: keep_local", "update_origin_differs: keep_local"),
    "last_update_wins": ("insert_exists: last_update_wins", "update_origin_differs: last_update_wins"),
}
ORIGINS = {("all",): "any", (): "none"}


async def conflict_policy(connection: asyncpg.Connection) -> str | None:
    """Return the policy that resolves conflicts as pglogical does; None: there is none."""
    resolution = await pglogical_subscription.load_conflict_resolution(connection)
    if resolution not in _POLICIES:
        return None
    always, tracking = _POLICIES[resolution]
    parts = (always, tracking if await pglogical_subscription.tracks_commits(connection) else "")
    return ", ".join(filter(None, parts))


async def find_obstacles(
    connection: asyncpg.Connection, publisher: Publisher, subscription: PglogicalSubscription
) -> list[Obstacle]:
    """Return the reasons on the target why the subscription cannot be taken over exactly."""
    quoted, obstacles = sql_literal(subscription.name), []
    if unready := await pglogical_subscription.load_unready(connection, subscription.oid):
        remedy = f"SELECT pglogical.wait_for_subscription_sync_complete({quoted});"
        obstacles.append(Obstacle(f"Its initial copy has not ended: {handover.abbreviated(unready)}.", remedy))
    if subscription.is_delayed:
        remedy = f"UPDATE pglogical.subscription SET sub_apply_delay = '0' WHERE sub_name = {quoted};"
        obstacles.append(Obstacle("It has an apply_delay, which subscriber does not have.", remedy))
    origin = ORIGINS.get(subscription.forward_origins)
    if origin is None:
        given = ", ".join(subscription.forward_origins)
        obstacles.append(Obstacle(f"Its forward_origins are neither all nor none: {given}.", _create_again(quoted)))
    elif origin == "none" and not features.ORIGIN_FILTER.is_in(publisher.server_version):
        what = "Its forward_origins are empty, and a publisher before PostgreSQL 16 sends the changes of all origins."
        obstacles.append(Obstacle(what, _create_again(quoted)))
    if await conflict_policy(connection) is None:
        resolution = await pglogical_subscription.load_conflict_resolution(connection)
        remedy = "Set pglogical.conflict_resolution to another value, and reload the configuration."
        obstacles.append(
            Obstacle(f"No conflict_policy is the same as pglogical.conflict_resolution = {resolution}.", remedy)
        )
    return obstacles


def _create_again(name: str) -> str:
    return (
        f"SELECT pglogical.drop_subscription({name}); then create it with forward_origins := '{{all}}' and"
        " synchronize_data := true, or CREATE SUBSCRIPTION in subscriber."
    )


async def find_differences(
    publisher: Publisher, subscription: PglogicalSubscription, publications: tuple[str, ...]
) -> list[Obstacle]:
    """Return the differences between the changes of the replication sets and of the publications."""
    sets = await pglogical.replication_sets(publisher, subscription.replication_sets)
    differences = []
    if sequences := await pglogical.sequences(publisher, subscription.replication_sets):
        remedies = [
            "SELECT pglogical.replication_set_remove_sequence"
            f"({sql_literal(container)}, {sql_literal(sql_name(*name))});"
            for container, name in sequences
        ]
        shown = handover.abbreviated([".".join(name) for _, name in sequences])
        what = f"Its replication sets contain sequences, which no publication carries: {shown}."
        differences.append(Obstacle(what, f"On the publisher: {' '.join(remedies)} Later: SET (sequences = follow)."))
    if filtered := [entry for entry in sets if entry.is_filtered]:
        shown = handover.abbreviated([f"{'.'.join(entry.table)} in {entry.container}" for entry in filtered])
        what = f"pglogical evaluates row filters on other rows than publications do: {shown}."
        differences.append(
            Obstacle(what, "Publish these tables without a row filter, in a replication set of their own.")
        )
    lists = [entry for entry in sets if entry.has_column_list]
    if lists and not features.COLUMN_LISTS.is_in(publisher.server_version):
        shown = handover.abbreviated([".".join(entry.table) for entry in lists])
        what = f"Publications before PostgreSQL 15 have no column lists: {shown}."
        differences.append(Obstacle(what, "Replicate all columns of these tables."))
    if differences:
        return differences
    if not publications:
        what = "It has replication sets, in place of which subscriber needs publications."
        return [Obstacle(what, _statements(subscription, sets))]
    if missing := await publisher.missing_publications(publications):
        return [Obstacle(f"The publisher does not have: {', '.join(missing)}.", _statements(subscription, sets))]
    return [
        Obstacle(difference, f"Make the publications the same as these:\n{_statements(subscription, sets)}")
        for difference in _differences(sets, await pglogical.publications(publisher, publications))
    ][: handover.NAMED]


def _differences(sets: Iterable[Entry], publications: Iterable[Entry]) -> Iterator[str]:
    """Yield a sentence for each table that differs."""
    wanted, given = pglogical.combined(sets), pglogical.combined(publications)
    for table in sorted(wanted.keys() | given.keys()):
        name = ".".join(table)
        if table not in given:
            yield f"The replication sets contain {name}, and the publications do not."
        elif table not in wanted:
            yield f"The publications contain {name}, and the replication sets do not."
        elif given[table].is_filtered:
            yield f"A publication has a row filter for {name}."
        elif given[table].actions != wanted[table].actions:
            actions = ", ".join(action for action in ACTIONS if action in wanted[table].actions)
            yield f"The replication sets publish other actions of {name} than the publications: {actions}."
        elif given[table].columns != wanted[table].columns:
            differing = ", ".join(sorted(given[table].columns ^ wanted[table].columns))
            yield f"Only the replication sets, or only the publications, contain these columns of {name}: {differing}."


def _statements(subscription: PglogicalSubscription, sets: Sequence[Entry]) -> str:
    """Return the statements that create the same publications, one for each set with tables, and the command."""
    statements, publications = [], []
    for container in dict.fromkeys(entry.container for entry in sets):
        entries = [entry for entry in sets if entry.container == container]
        publication = f"{subscription.name}_{container}"
        tables = ", ".join(
            sql_name(*entry.table)
            + (f" ({', '.join(map(sql_identifier, sorted(entry.columns)))})" if entry.has_column_list else "")
            for entry in entries
        )
        actions = ", ".join(action for action in ACTIONS if action in entries[0].actions)
        statements.append(
            f"CREATE PUBLICATION {sql_identifier(publication)} FOR TABLE {tables} WITH (publish = '{actions}');"
        )
        publications.append(f" --publication {shell_word(publication)}")
    command = f"subscriber adopt {shell_word(subscription.name)}{''.join(publications)}"
    return "\n".join(["On the publisher:", *statements, f"Then: {command}"])
