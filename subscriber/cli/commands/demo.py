"""`subscriber demo`: replicate, or move a database, between two temporary servers."""

from __future__ import annotations

from typing import Annotated

import typer


async def demo(
    migrate: Annotated[
        bool, typer.Option("--migrate", help="Move a database with its applications, back, and there again instead.")
    ] = False,
    seconds: Annotated[int, typer.Option(help="Seconds for which applications write undisturbed.", min=1)] = 20,
    scale: Annotated[int, typer.Option(help="pgbench's scale: 100,000 accounts each.", min=1)] = 1,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the servers running until Ctrl-C, and print their connection strings.")
    ] = False,
) -> int:
    """Replicate between two temporary servers, and verify the result.

    While pgbench and a writer of many types write, the worker is killed with SIGKILL and restarted. Then both sides are
    compared row by row; exits 1 if they differ.

    With --migrate, applications write to a shop that moves to the other server. Exits 1 if an order that was
    acknowledged is not there once.
    """
    if migrate:
        from subscriber.demo.move import run_move_demo

        return await run_move_demo(seconds=seconds, scale=scale, keep=keep)
    from subscriber.demo.demo import run_demo

    return await run_demo(seconds=seconds, scale=scale, keep=keep)
