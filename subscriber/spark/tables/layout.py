"""Layout: how the rows of a table are divided into files: by partitions, and in the order of cluster columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import pyarrow as pa

from subscriber.spark.tables.cluster import Cluster, check_cluster, following_cluster
from subscriber.spark.tables.partitions import Partitions, check_partitions, renamed_partitions


class Layout(NamedTuple):
    """The partitions and the cluster columns of a table."""

    partitions: Partitions = ()
    cluster: Cluster = ()

    def check(self, schema: pa.Schema) -> None:
        """Raise ApplyError if a table with these columns cannot have the layout."""
        check_partitions(self.partitions, schema)
        check_cluster(self.cluster, schema)

    def following(self, names: Mapping[str, str], schema: pa.Schema) -> Layout:
        """Return the layout after columns have changed.

        Args:
            names: the new names of columns. Columns without one are dropped.
            schema: the columns afterwards.
        """
        return Layout(
            renamed_partitions(self.partitions, names),
            following_cluster(self.cluster, names, schema),
        )


NO_LAYOUT = Layout()
