"""The mapping of published tables to the target's tables: columns, and the row of an UPDATE or DELETE."""

from __future__ import annotations

from dataclasses import replace

import pytest

from subscriber.apply.relation_map import LocalRelation, Plans, RelationMap, map_relation
from subscriber.errors import MappingError
from subscriber.protocol.messages import Relation, ReplicaIdentity
from tests.apply.build import column, local, remote

FULL, NOTHING, INDEX = ReplicaIdentity.FULL, ReplicaIdentity.NOTHING, ReplicaIdentity.INDEX
NO_IDENTITY = (
    'logical replication target relation "s.t" has neither REPLICA IDENTITY index nor PRIMARY KEY and published '
    "relation does not have REPLICA IDENTITY FULL"
)
NOT_SENT = 'publisher did not send replica identity column expected by the logical replication target relation "s.t"'


def test_columns_are_found_by_name() -> None:
    mapping = map_relation(remote("b", "a*"), local("a", "x", "b", identity=("a",)))
    assert [c.name for c in mapping.attributes] == ["b", "a"]
    assert mapping.search == (1,)
    assert mapping.unsearchable is None
    assert [c.name for c in mapping.local_only] == ["x"]
    assert mapping.label == "s.t"


def test_names_are_compared_exactly() -> None:
    with pytest.raises(MappingError, match=r'missing replicated column: "A"'):
        map_relation(remote("A"), local("a"))


def test_a_generated_column_of_the_target_is_nobodys() -> None:
    mapping = map_relation(remote("a*"), local("a", column("g", generated=True), identity=("a",)))
    assert mapping.local_only == ()


@pytest.mark.parametrize(
    ("published", "table", "message"),
    [
        (
            remote("a", "b"),
            local("a"),
            'logical replication target relation "s.t" is missing replicated column: "b"',
        ),
        (
            remote("c", "a", "b"),
            local("a"),
            'logical replication target relation "s.t" is missing replicated columns: "c", "b"',
        ),
        (
            remote("a", "b"),
            local("a", column("b", generated=True)),
            'logical replication target relation "s.t" has incompatible generated column: "b"',
        ),
        (
            remote("a", "b"),
            local(column("a", generated=True), column("b", generated=True)),
            'logical replication target relation "s.t" has incompatible generated columns: "a", "b"',
        ),
        (  # missing columns are reported first
            remote("a", "b"),
            local(column("a", generated=True)),
            'logical replication target relation "s.t" is missing replicated column: "b"',
        ),
        (  # an empty schema on the wire is pg_catalog
            remote("a", namespace=""),
            local(schema="pg_catalog"),
            'logical replication target relation "pg_catalog.t" is missing replicated column: "a"',
        ),
    ],
)
def test_a_mapping_with_columns_that_do_not_fit_is_refused(
    published: Relation, table: LocalRelation, message: str
) -> None:
    with pytest.raises(MappingError) as caught:
        map_relation(published, table)
    assert caught.value.message == message
    assert caught.value.sqlstate == "55000"


@pytest.mark.parametrize(
    ("published", "table", "search", "unsearchable"),
    [
        pytest.param(remote("a*", "b"), local("a", "b", identity=("a",)), (0,), None, id="the same key"),
        pytest.param(remote("a*", "b*", "c"), local("a", "b", "c", identity=("b",)), (1,), None, id="part of the key"),
        pytest.param(
            remote("a*", "b*"), local("a", "b", identity=("b", "a")), (1, 0), None, id="in the order of the index"
        ),
        pytest.param(
            remote("a*", "b"), local("a", "b", identity=("a", "b")), None, NOT_SENT, id="more than the published key"
        ),
        pytest.param(remote("a*", "b"), local("a", "b", identity=("b",)), None, NOT_SENT, id="another column"),
        pytest.param(
            remote("a*"), local("a", "z", identity=("z",)), None, NOT_SENT, id="a column the publisher does not have"
        ),
        pytest.param(
            remote("a", replica_identity=FULL), local("a", identity=("a",)), (0,), None, id="full, and a key here"
        ),
        pytest.param(remote("a", "b", replica_identity=FULL), local("a", "b"), None, None, id="full, and no key here"),
        pytest.param(remote("a*"), local("a"), None, NO_IDENTITY, id="no key here"),
        pytest.param(remote("a*", replica_identity=INDEX), local("a"), None, NO_IDENTITY, id="an index there only"),
        pytest.param(
            remote("a*", "b", replica_identity=INDEX), local("a", "b", identity=("a",)), (0,), None, id="index"
        ),
        pytest.param(remote("a", replica_identity=NOTHING), local("a"), None, NO_IDENTITY, id="nothing"),
        pytest.param(
            remote("a", replica_identity=NOTHING), local("a", identity=("a",)), None, NOT_SENT, id="nothing, a key here"
        ),
        pytest.param(remote(replica_identity=FULL), local("z"), None, None, id="no columns"),
    ],
)
def test_a_row_is_searched_by_the_identity_that_both_sides_have(
    published: Relation, table: LocalRelation, search: tuple[int, ...] | None, unsearchable: str | None
) -> None:
    mapping = map_relation(published, table)
    assert mapping.search == search
    assert (mapping.unsearchable and mapping.unsearchable.message) == unsearchable


def test_a_table_without_a_usable_key_has_a_hint_with_the_statement() -> None:
    deferrable = replace(local("a", "b"), deferrable_key=("a", "b"))
    reason = map_relation(remote("a*", "b"), deferrable).unsearchable
    assert reason is not None
    assert reason.message.startswith('the primary key of logical replication target relation "s.t" is DEFERRABLE')
    assert reason.hint == (
        'On the target: CREATE UNIQUE INDEX "t_identity" ON "s"."t" ("a", "b");'
        ' ALTER TABLE "s"."t" REPLICA IDENTITY USING INDEX "t_identity";'
    )
    reason = map_relation(remote("a*", "b"), local("a", "b")).unsearchable
    assert reason is not None
    assert reason.hint == 'On the target: ALTER TABLE "s"."t" ADD PRIMARY KEY ("a");'
    reason = map_relation(remote("a*", "b"), local("a", "b", identity=("b",))).unsearchable
    assert reason is not None
    assert reason.hint.startswith('The target finds rows by ("b"), the publisher sends ("a").')


def test_a_relation_message_replaces_everything() -> None:
    relations = RelationMap()
    old, new = remote("a"), remote("b")
    relations.update(old)
    assert relations.get(old.relid) is None
    mapping = map_relation(old, local("a"))
    relations.put(mapping)
    assert relations.get(old.relid) is mapping
    relations.update(new)
    assert relations.get(new.relid) is None
    assert relations.relation(new.relid) is new


def test_the_same_description_keeps_its_mapping() -> None:
    """A relation is described again after TRUNCATE, in any transaction."""
    relations = RelationMap()
    relations.update(remote("a"))
    mapping = map_relation(remote("a"), local("a"))
    relations.put(mapping)
    relations.update(replace(remote("a"), xid=7))
    assert relations.get(mapping.remote.relid) is mapping


def test_a_mapping_of_before_holds_for_the_same_description() -> None:
    before = RelationMap()
    published = remote("a")
    before.update(published)
    mapping = map_relation(published, local("a"))
    before.put(mapping)
    streamed = RelationMap(before)
    assert streamed.get(published.relid) is None  # the transaction has not described it
    streamed.update(replace(published, xid=7))
    assert streamed.get(published.relid) is mapping
    streamed.update(replace(remote("b"), xid=7))
    assert streamed.get(published.relid) is None
    before.take_over(streamed)
    assert before.get(published.relid) is None


def test_statements_do_not_pile_up() -> None:
    """As many as there are patterns of NULLs in the rows of a table without key: 2 to the number of its columns."""
    plans = map_relation(remote("a"), local("a")).plans
    for number in range(10 * Plans.LIMIT):
        plans[number] = "a statement"
        assert plans[number] == "a statement"
        assert len(plans) <= Plans.LIMIT
    before = len(plans)
    plans[10 * Plans.LIMIT - 1] = "another"
    assert len(plans) == before
