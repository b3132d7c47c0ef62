"""The cluster columns of an Iceberg table, which its metadata have as the sort order of the table.

Other programs find it there. An order that another program has given the table is followed, too: its columns with
values that have an order are the cluster columns. A transform or a descending order makes no difference for the ranges
of files. Files of rows that are not exactly in the order of the table do not name it.
"""

from __future__ import annotations

from typing import NamedTuple

from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.sorting import (
    UNSORTED_SORT_ORDER,
    NullOrder,
    SortDirection,
    SortField,
    SortOrder,
)
from pyiceberg.table.update import (
    AddSortOrderUpdate,
    SetDefaultSortOrderUpdate,
    TableUpdate,
)
from pyiceberg.transforms import IdentityTransform

from subscriber.spark.tables.cluster import Cluster, following_cluster
from subscriber.spark.tables.iceberg_types import arrow_schema


class IcebergLayout(NamedTuple):
    """The specification of partitions, and the sort order of an Iceberg table."""

    spec: PartitionSpec
    order: SortOrder


def cluster_of(order: SortOrder, schema: Schema) -> Cluster:
    """Return the cluster columns that a sort order stands for."""
    numbers = {field.field_id: field.name for field in schema.fields}
    names = [numbers[field.source_id] for field in order.fields if field.source_id in numbers]
    return following_cluster(dict.fromkeys(names), {name: name for name in names}, arrow_schema(schema))


def is_followed(order: SortOrder, schema: Schema) -> bool:
    """Return True if rows in the order of the cluster columns are exactly in this order."""
    ours = [_field(name, schema) for name in cluster_of(order, schema)]
    return bool(ours) and order.fields == ours


def order_with(metadata: TableMetadata, cluster: Cluster, schema: Schema) -> SortOrder:
    """Return the sort order of a table with these columns, whose cluster columns are `cluster`.

    It is the one that the table has, if that stands for these columns, and one of its earlier orders if possible.
    """
    current, numbers = metadata.sort_order(), {field.field_id for field in schema.fields}
    if cluster_of(current, schema) == cluster and all(field.source_id in numbers for field in current.fields):
        return current
    if not cluster:
        return UNSORTED_SORT_ORDER
    fields = [_field(name, schema) for name in cluster]
    if (existing := next((order for order in metadata.sort_orders if order.fields == fields), None)) is not None:
        return existing
    return SortOrder(*fields, order_id=max((order.order_id for order in metadata.sort_orders), default=0) + 1)


def order_updates(metadata: TableMetadata, order: SortOrder) -> tuple[TableUpdate, ...]:
    """Return the updates that give a table a sort order."""
    if order.order_id == metadata.default_sort_order_id:
        return ()
    is_new = all(known.order_id != order.order_id for known in metadata.sort_orders)
    added = (AddSortOrderUpdate(sort_order=order),) if is_new else ()
    # A catalog may give a new order another number. The one without columns is always number 0.
    return *added, SetDefaultSortOrderUpdate(sort_order_id=-1 if is_new and order.fields else order.order_id)


def _field(name: str, schema: Schema) -> SortField:
    source = schema.find_field(name).field_id
    return SortField(source, IdentityTransform(), SortDirection.ASC, NullOrder.NULLS_LAST)
