"""Random transactions on the source, from one random number generator."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import asyncpg

from tests.differential.tables import Table
from tests.plugins.fix_cluster import Database

Connection = asyncpg.Connection

# Errors that a random statement may cause on the source. Its transaction is rolled back, as part of the workload.
EXPECTED = (
    asyncpg.UniqueViolationError,
    asyncpg.LockNotAvailableError,
    asyncpg.DeadlockDetectedError,
    asyncpg.NumericValueOutOfRangeError,
    asyncpg.FeatureNotSupportedError,
    asyncpg.ForeignKeyViolationError,
    asyncpg.ProgramLimitExceededError,
)

numbers = itertools.count(1)


@dataclass(frozen=True)
class Habits:
    """Additional features of transactions."""

    prepared: bool = False  # PREPARE TRANSACTION, and its end later or never
    cascade: bool = False  # TRUNCATE … CASCADE, and of several tables


class Writer:
    """One session with transactions of random length, given one statement at a time."""

    def __init__(
        self,
        random: Random,
        connection: asyncpg.Connection[asyncpg.Record],
        tables: Sequence[Table],
        habits: Habits = Habits(),
    ) -> None:
        self.tables = list(tables)
        self.committed = 0
        self.rolled_back = 0  # in whole or in part
        self.statements = 0
        self.changes = 0  # rows, including those of rolled-back transactions
        self.failed: list[str] = []
        self._habits = habits
        self._prepared: list[str] = []  # names, not ended yet
        self._random = random
        self._connection = connection
        self._left = 0  # statements of the open transaction; 0: none is open
        self._savepoints = 0
        self._truncated = False  # in the open transaction

    async def step(self) -> None:
        """Execute one more statement."""
        self.statements += 1
        if not self._left and self._prepared and self._random.random() < 0.4:
            await self._end_prepared()
            return
        if not self._left:
            self._left = self._random.choice([1, 1, 2, 3, 8, 30])
            self._savepoints = 0
            self._truncated = False
            await self._connection.execute("BEGIN")
        try:
            status = await self._connection.execute(self._statement())
            count = status.rpartition(" ")[2]
            self.changes += int(count) if count.isdecimal() else 0
            self._left -= 1
            if not self._left:
                await self._end()
        except EXPECTED as error:
            self.failed.append(str(error))
            self.rolled_back += 1
            await self._connection.execute("ROLLBACK")
            self._left = 0

    async def _end(self) -> None:
        """End the transaction. Some transactions are rolled back, in part or as a whole."""
        if self._habits.prepared and len(self._prepared) < 3 and self._random.random() < 0.3:
            name = f"oracle {next(numbers)}"
            await self._connection.execute(f"PREPARE TRANSACTION '{name}'")
            self._prepared.append(name)
            return
        match self._random.randint(1, 12):
            case 1:
                self.rolled_back += 1
                await self._connection.execute("ROLLBACK")
            case _:
                await self._connection.execute("COMMIT")
                self.committed += 1

    async def _end_prepared(self) -> None:
        name = self._prepared.pop(self._random.randrange(len(self._prepared)))
        if self._random.random() < 0.3:
            self.rolled_back += 1
            await self._connection.execute(f"ROLLBACK PREPARED '{name}'")
        else:
            self.committed += 1
            await self._connection.execute(f"COMMIT PREPARED '{name}'")

    async def finish(self) -> None:
        """End the open transaction, if there is one, and all that is prepared."""
        if self._left:
            await self._connection.execute("COMMIT")
            self._left = 0
        while self._prepared:
            await self._end_prepared()

    def _statement(self) -> str:
        random = self._random
        dice = random.random()
        if dice < 0.06 and not self._truncated:
            self._savepoints += 1
            return f"SAVEPOINT s{self._savepoints}"
        if dice < 0.11 and self._savepoints:
            self.rolled_back += 1
            back_to = random.randint(1, self._savepoints)
            self._savepoints = back_to
            return f"ROLLBACK TO s{back_to}"
        table = random.choice(self.tables)
        # PostgreSQL itself cannot always decode TRUNCATE between savepoints (see UNDECODABLE in beside.py).
        if 0.11 <= dice < 0.125 and not self._savepoints:
            self._truncated = True
            if self._habits.cascade:
                several = random.sample(self.tables, random.randint(1, 3))
                cascade = random.choice(["", " CASCADE"])
                return f"TRUNCATE {', '.join(t.name for t in several)}{cascade}"
            other = random.choice([table, table, random.choice(self.tables)])
            return f"TRUNCATE {table.name}" if other is table else f"TRUNCATE {table.name}, {other.name}"
        if dice < 0.5 or not table.changes:
            return self._insert(table)
        if dice < 0.85:
            return self._update(table)
        return f"DELETE FROM {table.name} WHERE {self._some(table)}"

    def _insert(self, table: Table) -> str:
        names = ", ".join(table.columns)
        rows = ", ".join(
            "(" + ", ".join(value(self._random) for value in table.columns.values()) + ")"
            for _ in range(self._random.choice([1, 1, 1, 4, 20]))
        )
        conflict = " ON CONFLICT DO NOTHING"
        return f"INSERT INTO {table.name} ({names}) {table.insert_options} VALUES {rows}{conflict}"

    def _update(self, table: Table) -> str:
        random = self._random
        names = random.sample(list(table.columns), random.randint(1, len(table.columns)))
        if table.name == "identities":  # a GENERATED ALWAYS column can only be set to DEFAULT
            names = [n for n in names if n != "id"] or ["v"]
        assignments = ", ".join(f"{name} = {table.columns[name](random)}" for name in names)
        return f"UPDATE {table.name} SET {assignments} WHERE {self._some(table)}"

    def _some(self, table: Table) -> str:
        """Return a condition for one row, a few, or (rarely) all."""
        random = self._random
        column = random.choice(table.key)
        value = table.columns[column](random)
        match random.randint(1, 30):
            case 1:
                return "true"
            case 2:
                return f"{column} > {value}"
            case _:
                return f"{column} IS NOT DISTINCT FROM {value}"


class Workload:
    """Two sessions on the source whose transactions overlap."""

    def __init__(self, seed: int, source: Database, tables: Sequence[Table], habits: Habits = Habits()) -> None:
        self.random = Random(seed)
        self._source = source
        self._tables = tables
        self._habits = habits
        self.writers: list[Writer] = []

    async def run(self, steps: int) -> None:
        if not self.writers:
            for _ in range(2):
                connection = await self._source.connect(lock_timeout="10ms", deadlock_timeout="5ms")
                self.writers.append(Writer(self.random, connection, self._tables, self._habits))
        for _ in range(steps):
            await self.random.choice(self.writers).step()
        for writer in self.writers:
            await writer.finish()

    def add(self, table: Table) -> None:
        for writer in self.writers:
            writer.tables.append(table)

    def change(self, table: Table) -> None:
        """Replace the table of that name."""
        for writer in self.writers:
            writer.tables = [table if other.name == table.name else other for other in writer.tables]

    @property
    def rolled_back(self) -> int:
        """Return the number of transactions that were rolled back, as a whole or in part."""
        return sum(writer.rolled_back for writer in self.writers)
