"""A mirror to be killed.

python -m tests.mirror.victim_process DSN URL [UNTIL]
"""

from __future__ import annotations

import sys

import anyio

from subscriber import Lsn, mirror


async def main(*arguments: str) -> None:
    dsn, url, *until = arguments
    end = Lsn.parse(until[0]) if until else None
    await mirror(dsn, slot="m", publications=["p"], target=url, until=end)


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
