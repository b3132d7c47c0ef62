"""PostgreSQL's logical-replication subscriber, outside the server.

    import subscriber

    async with subscriber.connect(target_dsn) as db:
        await db.create_subscription("s", source=source_dsn, publications=["p"])
        async with db.running():
            await db.wait_for_sync("s")

    async with subscriber.stream(source_dsn, slot="s", publications=["p"]) as stream:
        async for transaction in stream:
            async for change in transaction:
                …
            await transaction.ack()

    await subscriber.mirror(source_dsn, slot="m", publications=["p"], target="sqlite+aiosqlite:///copy.db")

    async with subscriber.move_database(source_dsn, target_dsn, "move") as move:
        await move.cutover()

The examples are a subscription between two servers, a change stream without a target, and a copy in another database.
consume() passes a change stream to callbacks.

The names in __init__.pyi are public: the one list of them, for type checkers and for this module. A name is imported
when it is first used, because `subscriber --help` has to answer in a tenth of a second.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

__loader__: Any


@cache
def _modules() -> dict[str, str]:
    """Return the module of each public name, in the order of the names. The package may be in an archive."""
    text = __loader__.get_data(__file__.rpartition(".")[0] + ".pyi").decode()
    imports = [
        line.split() for line in text.splitlines() if line.startswith("from ")
    ]  # from MODULE import NAME as NAME
    return dict(sorted((words[3], words[1]) for words in imports))


def __getattr__(name: str) -> object:
    if name == "__all__":
        return list(_modules())
    if name not in _modules():
        raise AttributeError(f"module 'subscriber' has no attribute {name!r}")
    return getattr(import_module(_modules()[name]), name)


def __dir__() -> list[str]:
    return list(_modules())
