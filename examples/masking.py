"""A staging database with production data, but without personal names.

    python examples/masking.py SOURCE_DSN TARGET_DSN PUBLICATION

Runs until Ctrl-C. Rows of the tables below are changed before they reach the target, both in the initial copy and in
every later change. Other tables of the publication are replicated unchanged. The tables must exist on the target,
`person` in schema staging. A program without these hooks cannot run this subscription: it gets an error.
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
    """Return the same pseudonym for the same text, so that related rows stay related.

    A production version takes a key.
    """
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def without_names(row: dict[str, Any]) -> dict[str, Any]:
    """Replace the person's name in the free text about them.

    NULL and UNCHANGED are both false: an unchanged text has already been masked. If the name was not sent, it cannot be
    replaced. The exception then stops the subscription, which is better than replicating the name.
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
        # Only the columns of the key are known for every change: here the tenant is part of the key.
        "invoice": Hook(where=lambda row: row["tenant"] == "demo"),
    }
)


async def main(source: str, target: str, publication: str) -> None:
    """Create the subscription if it does not exist, and run it."""
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
