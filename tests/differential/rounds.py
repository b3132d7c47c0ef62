"""Rounds of random tables and random transactions under random options. The seed determines everything."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import anyio

from subscriber.settings import Settings
from tests.differential.beside import Beside, disturb
from tests.differential.generated import generate, kinds_for
from tests.differential.tables import Table, key
from tests.differential.workload import Habits, Workload
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import QUICK

DOWN = 0.3  # seconds between stop and start of the target server
FAMILY = (  # tables that TRUNCATE … CASCADE reaches from another one, on the source only
    Table("parent", {"id": key}, ("CREATE TABLE parent (id int PRIMARY KEY)",)),
    Table(
        "child",
        {"id": key, "parent": key},
        ("CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES parent ON UPDATE CASCADE ON DELETE CASCADE)",),
        ("CREATE TABLE child (parent int, id int PRIMARY KEY)",),
    ),
)
# Sizes at which batches, blocks and turns end; the last is as it is in use, None.
SIZES: tuple[tuple[str, tuple[int | None, ...]], ...] = (
    ("batch_rows", (1, 2, 7, 100, None)),
    ("batch_size", (300, 5000, None, None)),
    ("batch_steps", (1, 2, 5, None)),
    ("batch_small_transaction", (0, 1, 3, 20, None)),
    ("batch_run", (2, 3, None)),
    ("batch_largest_message", (200, 3000, None, None)),
    ("batch_min_rows", (1, 2, 5)),
    ("batch_min_rows_per_step", (0, 0, 1)),
    ("batch_retry_rows", (0, 0, 3)),
    ("batches_in_flight", (1, 2, None)),
    ("parallel_batch_min_rows", (1, 3, 20)),
    ("copy_chunk_rows", (1, 3, None)),
    ("messages_per_turn", (1, 5, None, None)),
    ("large_transaction_messages", (3, 50, None)),
    ("parallel_messages_per_turn", (1, 5, None)),
    ("spool_block_remainder", (0, 100, None)),
)


@dataclass(frozen=True)
class Round:
    """The options and tables that follow from a seed."""

    seed: int
    binary: bool
    streaming: str
    two_phase: bool
    sessions: int
    immediate: bool  # the publisher streams each change, as far as it streams
    tracking: bool  # the targets' server has track_commit_timestamp
    kills: bool
    crashes: bool  # of the targets' server
    one_by_one: bool
    tables: int
    phases: int

    @classmethod
    def of(cls, seed: int) -> Round:
        random = Random(f"round {seed}")
        tracking = random.random() < 0.35
        return cls(
            seed,
            binary=random.random() < 0.5,
            streaming=random.choice(["off", "on", "parallel"]),
            two_phase=random.random() < 0.4,
            sessions=random.choice([1, 2, 4]),
            immediate=random.random() < 0.4,
            tracking=tracking,
            kills=random.random() < 0.25,
            crashes=random.random() < 0.2,
            one_by_one=random.random() < 0.2,
            tables=random.choice([8, 14, 20]),
            phases=random.choice([2, 3, 4]),
        )

    @property
    def options(self) -> Mapping[str, str]:
        return {"streaming": self.streaming, "two_phase": str(self.two_phase).lower()}

    def __str__(self) -> str:
        said = [f"seed {self.seed}: {'binary' if self.binary else 'text'}", f"streaming {self.streaming}"]
        said += [f"{self.sessions} apply sessions", f"{self.tables} tables", f"{self.phases} phases"]
        for name in ("two_phase", "immediate", "tracking", "kills", "crashes", "one_by_one"):
            if getattr(self, name):
                said.append(name)
        return ", ".join(said)

    def settings(self) -> Settings:
        """Return settings with which the limits of batches are reached."""
        random = Random(f"sizes {self.seed}")
        chosen = {name: random.choice(sizes) for name, sizes in SIZES}
        sizes: dict[str, Any] = {name: size for name, size in chosen.items() if size is not None}
        return replace(QUICK, one_by_one=self.one_by_one, **sizes)


@dataclass
class Played:
    """Figures of rounds."""

    rounds: int = 0
    tables: int = 0
    transactions: int = 0
    statements: int = 0
    compared: int = 0  # times that all tables were
    counted: int = 0  # times that conflicts were
    changes: int = 0
    conflicts: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        met = {name.removeprefix("confl_"): count for name, count in self.conflicts.items() if count}
        return (
            f"{self.rounds} rounds, {self.tables} tables, {self.statements} statements, {self.transactions}"
            f" transactions, {self.changes} rows changed;"
            f" compared {self.compared} times, conflicts {self.counted} times: {met}"
        )


async def tables_of(round: Round, source: Database) -> list[Table]:
    random = Random(f"tables {round.seed}")
    kinds = kinds_for(binary=round.binary, xml=await _has_xml(source))
    return [*(generate(random, index, kinds) for index in range(round.tables)), *FAMILY]


async def _has_xml(source: Database) -> bool:
    return "--with-libxml" in str(await source.value("SELECT setting FROM pg_config WHERE name = 'CONFIGURE'"))


class Course:
    """One round."""

    def __init__(self, pair: Beside, round: Round, steps: int, played: Played) -> None:
        self.pair = pair
        self.round = round
        self.steps = steps
        self.played = played
        self.random = Random(f"course {round.seed}")
        habits = Habits(prepared=round.two_phase or self.random.random() < 0.3, cascade=True)
        self.work = Workload(round.seed, pair.source, pair.tables, habits)
        self.disturbed = False

    async def run(self) -> None:
        pair, round = self.pair, self.round
        name = pair.source.name
        await pair.source.execute(f"ALTER DATABASE {name} SET logical_decoding_work_mem = '64kB'")
        if round.immediate:
            await pair.source.stream_everything()
        await pair.create_tables()
        await self.work.run(self.steps)
        if round.tracking:  # a row that was copied has another origin than one that was sent, and counts
            await pair.subscribe()
            await pair.wait()
            await self.work.run(self.steps)
        else:
            await asyncio.gather(pair.subscribe(), self.work.run(self.steps))
        await self.compare()
        for phase in range(round.phases):
            await self.between(phase)
            await pair.count_from_here()
            rolled_back, self.disturbed = self.work.rolled_back, False
            await self.phase()
            await self.compare()
            # Transactions that are rolled back may have met conflicts before, or may not have been sent.
            uncertain = round.streaming == "parallel" or round.two_phase
            if not self.disturbed and not pair.has_failed() and not (uncertain and rolled_back < self.work.rolled_back):
                self.played.conflicts.update(await pair.compare_counters())
                self.played.counted += 1
        self.played.rounds += 1
        self.played.tables += len(pair.tables)
        self.played.transactions += sum(writer.committed for writer in self.work.writers)
        self.played.statements += sum(writer.statements for writer in self.work.writers)
        self.played.changes += sum(writer.changes for writer in self.work.writers)

    async def compare(self) -> None:
        await self.pair.compare()
        self.played.compared += 1

    async def between(self, phase: int) -> None:
        """Add triggers to the tables, or write to both targets, which have equal rows now."""
        if phase == 0:
            await self._add_triggers()
        if self.random.random() < 0.6:
            without_key = self.round.streaming != "parallel"
            await self.pair.delete_here(without_key=without_key)
            await self._update_here(without_key=without_key)
        if self.random.random() < 0.7:
            await self._rename_column()

    async def phase(self) -> None:
        """Apply changes while they arrive, or as one backlog; tables change their columns meanwhile."""
        pair, random = self.pair, self.random
        backlog = random.random() < 0.4
        if backlog:
            await pair.enable(False)
        writing = asyncio.create_task(self._write())
        if backlog:
            await writing
            await pair.enable(True)
            writing = asyncio.create_task(self._write())
        async with anyio.create_task_group() as tasks:
            if self.round.kills:
                self.disturbed = True
                tasks.start_soon(disturb, pair, Random(f"kills {self.round.seed}"))
            if self.round.crashes and random.random() < 0.7:
                self.disturbed = True
                await anyio.sleep(random.uniform(0.05, 1))
                async with pair.calm:
                    await pair.native.server.stop("immediate")
                    await anyio.sleep(DOWN)
                    await pair.native.server.start()
            await writing
            async with pair.calm:  # a launcher that is being restarted gets there
                tasks.cancel_scope.cancel()

    async def _write(self) -> None:
        """Write, and change the columns of tables while no transaction is open."""
        for _ in range(2):
            await self.work.run(self.steps)
            await self._change_shape()

    # --- shapes -----------------------------------------------------------------------------------

    def _replace(self, table: Table, new: Table) -> None:
        self.pair.tables[self.pair.tables.index(table)] = new
        self.work.change(new)

    def _any_table(self) -> Table:
        return self.random.choice([table for table in self.pair.tables if table.kinds])

    async def _change_shape(self) -> None:
        """Change a table once. Rows are then written with the new columns while older ones are still in transit."""
        random, pair = self.random, self.pair
        table = self._any_table()
        name = table.name
        async with pair.calm:
            match random.randint(1, 7):
                case 1:
                    await self._add_column(table)
                case 2:
                    await self._drop_column(table)
                case 3:
                    await pair.both_patiently(f"CREATE INDEX ON {name} ({random.choice(table.key)})")
                case 4:
                    await pair.both_patiently(f"VACUUM FULL {name}")
                case 5 if table.identity == "key" and table.comparable:
                    await pair.source.execute(f"ALTER TABLE {name} REPLICA IDENTITY FULL")
                    usable = [kind for kind in table.kinds if kind.equality]
                    self._replace(table, replace(table, kinds=usable))
                case 6 if table.identity == "key":
                    await pair.source.execute(f"ALTER TABLE {name} REPLICA IDENTITY DEFAULT")
                case 7 if pair.enabled:
                    await self._add_table()
                case _:
                    await pair.both_patiently(f"ANALYZE {name}")

    async def _add_column(self, table: Table) -> None:
        """Add a column, on the targets first: a change with an unknown column cannot be applied."""
        kind = self.random.choice(table.kinds)
        column, keyed = f"added{len(table.columns)}", table.identity != "whole"
        statement = f"ALTER TABLE {table.name} ADD COLUMN IF NOT EXISTS {column} {kind.type}"
        if column in table.columns or await self._has_column(table, column):
            return
        await self.pair.both_patiently(statement)
        await self.pair.source.execute(statement)
        columns = {**table.columns, column: lambda random: kind.value(random, keyed=keyed)}
        self._replace(table, replace(table, columns=columns, comparable=table.comparable and kind.equality))

    async def _has_column(self, table: Table, column: str) -> bool:
        """Return True if the targets have the column. They keep columns that were dropped on the source."""
        has_column = await self.pair.ours.value(
            "SELECT count(*) FROM pg_attribute WHERE attrelid = $1::text::regclass AND attname = $2", table.name, column
        )
        return bool(has_column)

    async def _drop_column(self, table: Table) -> None:
        """Drop the column on the source. The targets keep the column and its values."""
        columns = [c for c in table.columns if c not in table.key and c.startswith(("c", "added"))]
        if len(columns) < 2:
            return
        column = self.random.choice(columns)
        await self.pair.source.execute(f"ALTER TABLE {table.name} DROP COLUMN {column}")
        kept = {c: value for c, value in table.columns.items() if c != column}
        self._replace(table, replace(table, columns=kept, same=False))

    async def _add_table(self) -> None:
        """Add an empty table to the publication: with two_phase PostgreSQL's subscription cannot copy it."""
        pair = self.pair
        kinds = kinds_for(binary=self.round.binary, xml=False)
        index = 100 + len(pair.tables)
        while True:
            table = generate(self.random, index, kinds)
            if table.publication == "leaves" and not any("PARTITION" in statement for statement in table.source):
                break
        for target in (pair.native, pair.ours):
            await target.execute(*(table.target or table.source))
        await pair.source.execute(*table.source, f"ALTER PUBLICATION leaves ADD TABLE {table.name}")
        await pair.refresh(copy=False)
        table = replace(table, triggers=())
        pair.tables.append(table)
        self.work.add(table)

    async def _rename_column(self) -> None:
        """Rename a column on all three databases while no change is in transit."""
        table = self._any_table()
        columns = [c for c in table.columns if c not in table.key and c.startswith("c")]
        if not columns:
            return
        old = self.random.choice(columns)
        new = f"c_{old}"
        statement = f"ALTER TABLE {table.name} RENAME COLUMN {old} TO {new}"
        await self.pair.both(statement)
        await self.pair.source.execute(statement)
        renamed = {new if c == old else c: value for c, value in table.columns.items()}
        self._replace(table, replace(table, columns=renamed))

    async def _add_triggers(self) -> None:
        for table in list(self.pair.tables):
            if table.triggers:
                await self.pair.both(*table.triggers)
                self._replace(table, replace(table, same=False, triggers=()))

    async def _update_here(self, *, without_key: bool) -> None:
        """Make rows on the targets differ from the source's in one column; `without_key` as for delete_here()."""
        for table in list(self.pair.tables):
            columns = [c for c in table.columns if c not in table.key and c != "id"]
            if table.local_update and columns and (without_key or table.identity != "whole"):
                column = self.random.choice(columns)
                value = table.columns[column](self.random)
                await self.pair.both(f"UPDATE {table.name} t SET {column} = {value} WHERE hashtext(t::text) % 3 = 1")
                self._replace(table, replace(table, same=False, local_update=self.random.random() < 0.5))
