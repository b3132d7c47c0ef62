"""A staging database with the production's data, but nobody's name in it.

    python examples/masking.py SOURCE_DSN TARGET_DSN PUBLICATION

Runs until Ctrl-C. Rows of the tables below are changed before they reach the target, in the copy as in every later
change; other tables of the publication come as they are. The tables must exist on the target, `person` in schema
staging. Whoever runs this subscription with a program that has no hooks is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from typing import Any

import subscriber
from subscriber import Hook, Hooks

NAME = "masking"


def pseudonym(text: str) -> str:
    """The same for the same text, so that what belonged together still does; a real one takes a key."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def without_names(row: dict[str, Any]) -> dict[str, Any]:
    """Replace the person's name in the free text about them.

    Neither NULL nor UNCHANGED is true: a text that was not changed has been done before. A name that was not sent
    could not be replaced; that raises here and stops the subscription, which is better than letting it through.
    """
    if row["notes"] and row["name"] is not None:
        row["notes"] = row["notes"].replace(row["name"], "N. N.")
    return row


HOOKS = Hooks(
    {
        "person": Hook(
            to="staging.person",
            row=without_names,
            mask={"name": pseudonym, "email": lambda text: f"{pseudonym(text)}@example.org", "phone": None},
            drop=["password"],
        ),
        # Only what identifies a row is known of every change to it: here the tenant is part of the key.
        "invoice": Hook(where=lambda row: row["tenant"] == "demo"),
    }
)


async def main(source: str, target: str, publication: str) -> None:
    """Create the subscription if it is not there, and run it."""
    async with subscriber.connect(target, hooks={NAME: HOOKS}) as db:
        if NAME not in [subscription.name for subscription in await db.subscriptions()]:
            connection = source.replace("'", "''")
            await db.execute(f"CREATE SUBSCRIPTION {NAME} CONNECTION '{connection}' PUBLICATION {publication}")
        async with db.running():
            await db.wait_for_sync(NAME)
            print("copied", flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
