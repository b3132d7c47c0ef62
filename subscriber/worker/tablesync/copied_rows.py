"""CopyReader: the rows of one COPY of an initial copy, read at the rate of the launcher and counted in the status."""

from __future__ import annotations

from collections.abc import AsyncIterator

from subscriber.connection.conninfo import Conninfo
from subscriber.connection.defaults import complete
from subscriber.connection.session import Session
from subscriber.display import sql_identifier, sql_name
from subscriber.errors import ServerError
from subscriber.publisher.tables import PublishedTable
from subscriber.remedy import Remedy
from subscriber.sqlstate import INSUFFICIENT_PRIVILEGE
from subscriber.subscription import Subscription
from subscriber.worker.copy_rate import CopyRate
from subscriber.worker.status import Report


class CopyReader:
    """Reads the rows of one COPY from the publisher."""

    def __init__(self, report: Report, rate: CopyRate) -> None:
        """Create the reader.

        Args:
            report: of the synchronization worker, whose rows and bytes grow.
            rate: the limit of the launcher's copies.
        """
        self._report = report
        self._rate = rate
        self._payloads = 0

    async def read(
        self, source: Session, statement: str, table: PublishedTable, subscription: Subscription
    ) -> AsyncIterator[list[bytes]]:
        """Yield the lists of Session.copy_out().

        Args:
            source: the session on the publisher.
            statement: the COPY … TO STDOUT.
            table: the table that the statement reads.
            subscription: the subscription.

        Raises:
            ServerError: the publisher refuses the statement. For a missing privilege, it names the GRANT.
        """
        try:
            async for payloads in source.copy_out(statement):
                self._payloads += len(payloads)
                size = sum(map(len, payloads))
                self._report.copied(len(payloads), size)
                await self._rate.spend(size)
                yield payloads
        except ServerError as error:
            if error.sqlstate == INSUFFICIENT_PRIVILEGE and error.remedy is None:
                role = sql_identifier(complete(Conninfo.parse(subscription.conninfo))["user"])
                usage = f"GRANT USAGE ON SCHEMA {sql_identifier(table.schema)} TO {role};"
                grant = f"GRANT SELECT ON TABLE {sql_name(table.schema, table.name)} TO {role};"
                error.amend(hint=Remedy("on the publisher", f"{usage} {grant}"))
            raise

    def finish(self, tag: str) -> None:
        """Replace the number of payloads in the count of rows by the number in `tag`, of the COPY into the target."""
        self._report.copied(int(tag.rsplit(maxsplit=1)[-1]) - self._payloads, 0)
