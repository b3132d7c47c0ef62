"""Removal of the rows of a table whose copy has to start again, in a session of the role that applies changes.

**Failure cases.** That session cannot record in the same transaction that the table is empty. The keeper therefore
first marks the table's parts as missing (catalog/copy_jobs.py: spoil()), and afterwards records that the copy of the
table starts again. If the keeper is killed between the two, the next keeper empties the table once more.
"""

from __future__ import annotations

from subscriber.apply.relation_map import refuse_exceeded
from subscriber.catalog.commands.ownership import refuse_deletion
from subscriber.catalog.store.subscription_rel import SubscriptionRel
from subscriber.connection.connect import open_session
from subscriber.ownership import TableOwnership
from subscriber.quoting import qualified
from subscriber.spark.copy.executor import APPLICATION_NAME
from subscriber.subscription import Subscription
from subscriber.targets.postgres import copy_transaction
from subscriber.targets.postgres.session.statement_context import StatementContext
from subscriber.targets.postgres.sql.owned_rows import owned_rows

# Tables referenced by other tables cannot be truncated alone.
_IS_REFERRED_TO = (
    "SELECT true FROM pg_catalog.pg_constraint WHERE confrelid = $1::pg_catalog.oid AND contype = 'f' LIMIT 1"
)


async def empty(target: str, subscription: Subscription, table: SubscriptionRel, ownership: TableOwnership) -> None:
    """Remove the rows of a table that was empty before its parts were copied.

    Args:
        target: the connection string of the role that applies changes.
        subscription: the subscription.
        table: the table.
        ownership: which rows of it belong to the subscription.

    Raises:
        StatementError: rows of the table may belong to another subscription.
        MappingError: the table does not match.
        ServerError: the target refuses a statement.
        ConnectionLost: the connection is lost.
    """
    refuse_deletion(subscription.name, (table.namespace, table.name), ownership)
    session = await open_session(target, application_name=APPLICATION_NAME)
    try:
        copying = await copy_transaction.copy_session(session, subscription, "on")
        local = await copy_transaction.begin(copying, table.namespace, table.name)
        refuse_exceeded(local, [code for code in local.foreign if code.default_of is None])
        referred = await copying.pipeline.rows(_IS_REFERRED_TO, str(local.oid))
        name, note = qualified(table.namespace, table.name), StatementContext("TRUNCATE")
        copying.roles.switch_for_tables([local], note)
        owned = owned_rows(subscription.ownership, local)
        deletes = referred or owned is not None
        statement = f"DELETE FROM {name} WHERE {owned or 'true'}" if deletes else f"TRUNCATE {name}"
        copying.pipeline.execute_once(statement, note=note)
        await copying.pipeline.rows("COMMIT")
    finally:
        session.abort()
