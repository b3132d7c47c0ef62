"""Tests that every target passes: subclass TargetContract in a test module of yours.

    class TestMyTarget(TargetContract):
        @asynccontextmanager
        async def open(self) -> AsyncIterator[Target]:
            yield MyTarget(...)

        async def rows(self, table: str) -> list[Values]:
            return ...

pytest runs the methods, with pytest-asyncio or the plugin of anyio. No server is needed beside the target's own. The
attributes of TargetContract say which of the permitted behaviors the target has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager

import anyio
import pytest

from subscriber.apply.hooks.config import Hook, Hooks
from subscriber.change_stream.rows import UNCHANGED
from subscriber.errors import ApplyError
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Insert
from subscriber.targets.base import RemoteTransaction, Target
from subscriber.testing import FakePublisher, FakeTable

Values = tuple[str | None, ...]  # of one row, as PostgreSQL writes them

# The tables that the tests change, for targets that need tables before the first change. The last one has REPLICA
# IDENTITY FULL.
DDL = (
    "CREATE TABLE public.item (id integer PRIMARY KEY, name text, note text)",
    "CREATE TABLE public.line (item integer, number integer, quantity integer, PRIMARY KEY (item, number))",
    "CREATE TABLE public.entry (kind text, amount integer)",
)


class TargetContract(ABC):
    """The tests of a target, see the top of the file. Each test starts with an empty target, whose position is 0/0.

    Attributes:
        has_tables_without_key: the target takes tables whose rows have no key. False: it has no table `entry`.
        writes_missing_rows: an UPDATE whose row is missing writes the new row. False: such an UPDATE is ignored.
    """

    has_tables_without_key = True
    writes_missing_rows = False

    @abstractmethod
    def open(self) -> AbstractAsyncContextManager[Target]:
        """Open the target, and close it at the end of the block. When it is opened again, it has the committed rows."""

    @abstractmethod
    async def rows(self, table: str) -> list[Values]:
        """Return the committed rows of `public.<table>`, in the order of the columns."""

    # --- set-up and assertions ----------------------------------------------------------------------

    def _publisher(self) -> tuple[FakePublisher, FakeTable, FakeTable, FakeTable]:
        publisher = FakePublisher()
        return (
            publisher,
            publisher.table("public.item", id="integer key", name="text", note="text"),
            publisher.table("public.line", item="integer key", number="integer key", quantity="integer"),
            publisher.table("public.entry", identity="full", kind="text", amount="integer"),
        )

    async def _apply(self, publisher: FakePublisher) -> None:
        async with self.open() as target:
            await publisher.apply(target)
            assert target.position == publisher.position

    async def _assert_rows(self, table: str, *expected: Values) -> None:
        def order(row: Values) -> tuple[str, ...]:
            return tuple("" if value is None else value for value in row)

        assert sorted(await self.rows(table), key=order) == sorted(expected, key=order)

    # --- changes --------------------------------------------------------------------------------------

    async def test_changes_by_key(self) -> None:
        publisher, item, line, _ = self._publisher()
        with publisher.transaction() as transaction:
            for number in range(1, 5):
                transaction.insert(item, id=number, name=f"n{number}")
            transaction.insert(line, item=1, number=1, quantity=5)
            transaction.insert(line, item=1, number=2, quantity=6)
        with publisher.transaction() as two:
            two.update(item, id=2, name="other", note="n")
            two.delete(item, id=3)
            two.update(line, item=1, number=2, quantity=7)
            two.delete(line, item=1, number=1)
        await self._apply(publisher)
        await self._assert_rows("item", ("1", "n1", None), ("2", "other", "n"), ("4", "n4", None))
        await self._assert_rows("line", ("1", "2", "7"))

    async def test_a_key_changes(self) -> None:
        publisher, item, *_ = self._publisher()
        with publisher.transaction() as transaction:
            transaction.insert(item, id=1, name="a")
            transaction.update(item, {"id": 1}, id=2, name="b")
            transaction.insert(item, id=1, name="c")
        await self._apply(publisher)
        await self._assert_rows("item", ("1", "c", None), ("2", "b", None))

    async def test_an_unchanged_value_is_kept(self) -> None:
        publisher, item, *_ = self._publisher()
        with publisher.transaction() as transaction:
            transaction.insert(item, id=1, name="a", note="large")
            transaction.update(item, id=1, name="b", note=UNCHANGED)
            transaction.update(item, {"id": 1}, id=2, name="c", note=UNCHANGED)
        await self._apply(publisher)
        await self._assert_rows("item", ("2", "c", "large"))

    async def test_whole_rows_are_the_identity(self) -> None:
        """Check that one of several equal rows is changed, and that NULL is equal to NULL."""
        if not self.has_tables_without_key:
            pytest.skip("the target has no tables without key")
        publisher, *_, entry = self._publisher()
        with publisher.transaction() as transaction:
            for kind in ("a", "a", "b", None):
                transaction.insert(entry, kind=kind, amount=1)
            transaction.update(entry, {"kind": "a", "amount": 1}, kind="a", amount=2)
            transaction.delete(entry, kind=None, amount=1)
            transaction.delete(entry, kind="missing", amount=1)
        await self._apply(publisher)
        await self._assert_rows("entry", ("a", "1"), ("a", "2"), ("b", "1"))

    async def test_a_row_that_is_missing_is_no_error(self) -> None:
        publisher, item, *_ = self._publisher()
        with publisher.transaction() as transaction:
            transaction.update(item, id=1, name="a")
            transaction.delete(item, id=2)
            transaction.insert(item, id=3, name="c")
        await self._apply(publisher)
        await self._assert_rows("item", ("3", "c", None), *[("1", "a", None)] * self.writes_missing_rows)

    async def test_no_part_of_a_missing_row_is_written(self) -> None:
        """Check an UPDATE without all values. The target ignores it, or raises an error."""
        publisher, item, *_ = self._publisher()
        with publisher.transaction() as transaction:
            transaction.update(item, id=1, name="a", note=UNCHANGED)
        try:
            await self._apply(publisher)
        except ApplyError:
            assert self.writes_missing_rows
        await self._assert_rows("item")

    async def test_texts_are_kept_as_they_are(self) -> None:
        publisher, item, *_ = self._publisher()
        texts = ["", "\\N", "\t\n\\", "'; --", '{"a": [1]}', "ü €", "NULL"]
        with publisher.transaction() as transaction:
            for number, text in enumerate(texts):
                transaction.insert(item, id=number, name=text)
        await self._apply(publisher)
        await self._assert_rows("item", *[(str(number), text, None) for number, text in enumerate(texts)])

    async def test_tables_are_truncated_together(self) -> None:
        publisher, item, line, _ = self._publisher()
        with publisher.transaction() as transaction:
            transaction.insert(item, id=1)
            transaction.insert(line, item=1, number=1)
        with publisher.transaction() as two:
            two.truncate(item, line)
            two.insert(item, id=2)
        with publisher.transaction() as three:
            three.insert(line, item=2, number=1)
            three.truncate(item)
        await self._apply(publisher)
        await self._assert_rows("item")
        await self._assert_rows("line", ("2", "1", None))

    async def test_many_transactions(self) -> None:
        """Apply enough transactions to fill several batches of a target that has batches."""
        publisher, item, line, _ = self._publisher()
        for start in range(0, 3000, 30):
            with publisher.transaction() as transaction:
                for number in range(start, start + 30):
                    transaction.insert(item, id=number, name="x")
                transaction.update(item, id=start, name="y")
                transaction.delete(item, id=start + 1)
                transaction.insert(line, item=start, number=0, quantity=start)
        await self._apply(publisher)
        names = {row[0]: row[1] for row in await self.rows("item")}
        assert names == {str(i): "y" if i % 30 == 0 else "x" for i in range(3000) if i % 30 != 1}
        assert len(await self.rows("line")) == 100

    # --- transactions ---------------------------------------------------------------------------------

    async def test_a_restart_resumes_where_it_stood(self) -> None:
        """Check that a transaction which is sent again is not applied again. A second insert would fail, or be seen."""
        publisher, item, *_, entry = self._publisher()
        for amount in range(3):
            with publisher.transaction() as transaction:
                transaction.insert(item, id=amount, name="a")
                if self.has_tables_without_key:
                    transaction.insert(entry, kind="a", amount=amount)
            with publisher.transaction() as two:
                two.update(item, id=amount, name="b")
            publisher.confirmed = Lsn(0)  # no status update has arrived
            await self._apply(publisher)
        async with self.open() as target:
            assert target.position == publisher.position
        await self._assert_rows("item", ("0", "b", None), ("1", "b", None), ("2", "b", None))
        if self.has_tables_without_key:
            await self._assert_rows("entry", ("a", "0"), ("a", "1"), ("a", "2"))

    async def test_an_open_transaction_is_rolled_back(self) -> None:
        publisher, item, *_ = self._publisher()
        with publisher.transaction() as transaction:
            transaction.insert(item, id=1, name="committed")
        await self._apply(publisher)
        async with self.open() as target:
            open_one = RemoteTransaction(900, Lsn(publisher.position + 8), 0)
            mapping = await target.map_relation(item.relation)
            row = item.row({"id": 2, "name": "not committed"})
            await target.change(open_one, mapping, Insert(None, item.relation.relid, row))
            target.flush()
            assert open_one.is_open_on_target
        async with self.open() as target:
            assert target.position == publisher.position
        await self._assert_rows("item", ("1", "committed", None))

    async def test_commits_are_reported_once_and_in_order(self) -> None:
        publisher, item, *_ = self._publisher()
        reported: list[int] = []
        async with self.open() as target:
            for number in range(1, 6):
                transaction = RemoteTransaction(number, Lsn(publisher.position + 16 * number), 0)
                mapping = await target.map_relation(item.relation)
                row = item.row({"id": number})
                await target.change(transaction, mapping, Insert(None, item.relation.relid, row))
                end = Lsn(transaction.finish_lsn + 8)
                await target.commit(transaction, end, lambda number=number: reported.append(number))  # type: ignore[misc]
                assert target.position == end
            await target.sync()
            assert reported == sorted(set(reported))
            assert reported[-1] == 5
        assert len(await self.rows("item")) == 5

    async def test_a_transaction_without_changes_is_none(self) -> None:
        publisher, item, *_ = self._publisher()
        with publisher.transaction():
            pass
        with publisher.transaction() as transaction:
            transaction.insert(item, id=1)
        with publisher.transaction():
            pass
        async with self.open() as target:
            await publisher.apply(target)
        await self._assert_rows("item", ("1", None, None))

    async def test_a_pause_commits(self) -> None:
        """Check that a transaction is committed when no other one follows."""
        publisher, item, *_ = self._publisher()
        committed = anyio.Event()
        async with self.open() as target, anyio.create_task_group() as tasks:
            tasks.start_soon(target.watch)
            transaction = RemoteTransaction(1, Lsn(publisher.position + 8), 0)
            mapping = await target.map_relation(item.relation)
            await target.change(transaction, mapping, Insert(None, item.relation.relid, item.row({"id": 1})))
            await target.commit(transaction, Lsn(publisher.position + 16), committed.set)
            with anyio.fail_after(30):
                while not committed.is_set():
                    await target.on_idle()
                    target.flush()
                    await anyio.sleep(0.01)
            await self._assert_rows("item", ("1", None, None))
            tasks.cancel_scope.cancel()

    async def test_transactions_that_were_sent_in_progress(self) -> None:
        """Check transactions that the publisher streamed before they were committed. One had changed a table before."""
        publisher, item, line, _ = self._publisher()
        with publisher.transaction() as transaction:
            transaction.insert(item, id=1, name="a")
        with publisher.transaction(streamed=True) as two:
            for number in range(2, 500):
                two.insert(item, id=number, name="b")
            two.insert(line, item=1, number=1)
            two.delete(item, id=1)
        with publisher.transaction() as three:
            three.update(item, id=2, name="c")
        await self._apply(publisher)
        names = {row[0]: row[1] for row in await self.rows("item")}
        assert names == {"2": "c"} | {str(number): "b" for number in range(3, 500)}
        await self._assert_rows("line", ("1", "1", None))

    async def test_hooks_change_rows_before_the_target_has_them(self) -> None:
        publisher, item, *_ = self._publisher()
        hooks = Hooks({"item": Hook(mask={"name": lambda name: name.upper()}, where=lambda row: row["id"] != "2")})
        with publisher.transaction() as transaction:
            transaction.insert(item, id=1, name="a")
            transaction.insert(item, id=2, name="b")
            transaction.update(item, id=1, name="c")
            transaction.update(item, id=2, name="d")
        async with self.open() as target:
            await publisher.apply(target, hooks=hooks)
        await self._assert_rows("item", ("1", "C", None))
