"""A Hive metastore as the catalog of Iceberg tables.

PyIceberg commits under a lock of the metastore, which excludes other commits. This catalog adds what a lake needs.

**Failure cases.**

- Columns whose types do not fit those before, position by position: the metastore refuses them, unless its setting
  `hive.metastore.disallow.incompatible.col.type.changes` is false. The commit is repeated after the columns that the
  metastore has are removed. They are a copy; readers use those in the metadata of Iceberg.
- Killed while the columns are removed: the metastore shows no columns until the next commit.
- Killed during a commit: the lock stays. A commit behind it fails with an error of the storage, so no table is set
  aside, and the next run continues. The metastore removes the lock after `hive.txn.timeout` if it cleans up locks.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hive_metastore.ttypes import (
    EnvironmentContext,
    InvalidOperationException,
    LockState,
    MetaException,
    UnlockRequest,
)
from pyiceberg.catalog.hive import DO_NOT_UPDATE_STATS, DO_NOT_UPDATE_STATS_DEFAULT, HiveCatalog
from pyiceberg.exceptions import CommitFailedException, WaitingForLockException
from pyiceberg.table import CommitTableResponse, Table
from pyiceberg.table.update import TableRequirement, TableUpdate
from pyiceberg.typedef import Identifier
from thrift.protocol.TProtocol import TProtocolException
from thrift.Thrift import TApplicationException, TException
from thrift.transport.TTransport import TTransportException

from subscriber.errors import ApplyError

# The metastore cannot be reached, or has failed.
_OF_THE_METASTORE = (TTransportException, TApplicationException, TProtocolException, MetaException)


class LakeHiveCatalog(HiveCatalog):
    """A Hive catalog that commits any change of columns.

    Errors of the metastore are OSErrors, as those of the storage. Its refusal of one table is an ApplyError.
    """

    def create_namespace_if_not_exists(self, *args: Any, **options: Any) -> None:
        with _metastore():
            super().create_namespace_if_not_exists(*args, **options)

    def load_table(self, identifier: str | Identifier) -> Table:
        with _metastore():
            return super().load_table(identifier)

    def create_table(self, *args: Any, **options: Any) -> Table:
        with _metastore():
            return super().create_table(*args, **options)

    def drop_table(self, identifier: str | Identifier) -> None:
        with _metastore():
            super().drop_table(identifier)

    def commit_table(
        self, table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
    ) -> CommitTableResponse:
        with _metastore():
            try:
                return super().commit_table(table, requirements, updates)
            except InvalidOperationException:
                self._remove_columns(*table.name())
                return super().commit_table(table, requirements, updates)

    def _remove_columns(self, database: str, name: str) -> None:
        """Remove the columns that the metastore has of a table. The table itself stays as it is."""
        context = EnvironmentContext(properties={DO_NOT_UPDATE_STATS: DO_NOT_UPDATE_STATS_DEFAULT})
        with self._client as client:
            lock = client.lock(self._create_lock_request(database, name))
            try:
                if lock.state != LockState.ACQUIRED:
                    self._wait_for_lock(database, name, lock.lockid, client)
                hive_table = self._get_hive_table(client, database, name)
                hive_table.sd.cols = []
                client.alter_table_with_environment_context(database, name, hive_table, context)
            finally:
                client.unlock(UnlockRequest(lockid=lock.lockid))


@contextmanager
def _metastore() -> Iterator[None]:
    """Convert the errors of the metastore in the block. Those of its client cannot pass a context manager."""
    try:
        yield
    except _OF_THE_METASTORE as error:
        raise OSError(errno.EIO, f"the Hive metastore fails: {_message(error)}") from error
    except TException as error:
        raise ApplyError(f"the Hive metastore refuses its table: {_message(error)}") from error
    except (CommitFailedException, WaitingForLockException) as error:
        if isinstance(error, CommitFailedException) and not isinstance(error.__cause__, WaitingForLockException):
            raise
        # A lock that another commit holds for so long is probably that of a process which was killed.
        raise OSError(
            errno.EBUSY,
            f"the Hive metastore has a lock on the table that does not end ({error}); SHOW LOCKS in Hive names its"
            " owner, and that of a killed process ends after hive.txn.timeout, if the metastore cleans up locks",
        ) from error


def _message(error: TException) -> str:
    return str(getattr(error, "message", None) or error)
