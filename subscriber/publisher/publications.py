"""Publications that a publisher does not have, and the names that a user may have meant."""

from __future__ import annotations

from collections.abc import Sequence

from subscriber.display import near_word, sql_identifier
from subscriber.errors import PublisherError
from subscriber.publisher.connection import Publisher
from subscriber.remedy import Remedy
from subscriber.sqlstate import UNDEFINED_OBJECT

MOST_NAMES = 10  # in a hint


async def check_publications(publisher: Publisher, publications: Sequence[str]) -> None:
    """Raise PublisherError if a publication does not exist."""
    if missing := await publisher.missing_publications(publications):
        raise PublisherError(
            f'publication "{missing[0]}" does not exist on the publisher',
            hint=await publication_remedy(publisher, missing),
            sqlstate=UNDEFINED_OBJECT,
        )


async def publication_remedy(publisher: Publisher, missing: Sequence[str]) -> Remedy:
    """Return the publications that `missing` may stand for, or the statement that creates the first of them."""
    return missing_remedy(missing[0], await publisher.publication_names())


def missing_remedy(missing: str, existing: Sequence[str]) -> Remedy:
    """Return what to do about a missing publication of a publisher that has the publications `existing`."""
    if near := near_word(missing, existing):
        return Remedy(near)
    create = Remedy("on the publisher", f"CREATE PUBLICATION {sql_identifier(missing)} FOR ALL TABLES;")
    if not existing:
        return create
    names = ", ".join(f'"{name}"' for name in existing[:MOST_NAMES])
    return Remedy(f"the publisher has: {names}{', …' if len(existing) > MOST_NAMES else ''}.", alternative=create)
