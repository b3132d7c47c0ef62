"""docs/reference/errors.md: every error class, its SQLSTATE, and how a subscription's worker reacts to it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import subscriber
from subscriber import errors
from subscriber.catalog.commands import publisher_connection
from subscriber.catalog.grammar import lexer
from subscriber.connection import errors as connection_errors
from subscriber.demo.servers import ServersError
from subscriber.errors import ChangeLogError, ServerError, StatementError, SubscriberError
from subscriber.worker.retry import TRANSIENT, Reaction, reaction
from tools.docs import markdown
from tools.docs.markdown import code

HEAD = """
All errors that are raised on purpose are a `subscriber.SubscriberError`. It has the parts that PostgreSQL's errors have:
`message`, one line; `detail`, facts in whole sentences; `hint`, what can be done; `sqlstate`, five characters; and
`context`, lines from the inside out. `detail` and `hint` are None when there is nothing to add. None of these texts has a
row's values in it, except what a server wrote into an error of its own, `ServerError`.

A command prints them on stderr as psql does and exits 3:

```text
ERROR:  subscription "shop" does not exist
```

Classes in bold can be imported from `subscriber`; catch these. The others are raised, too, and are caught by the class
they stand under. *Then* is what a subscription's worker does about it, after having it logged and shown in `subscriber
status`.
""".strip()

THEN = {
    Reaction.IMMEDIATE: "looks again at once",
    Reaction.SHORT_DELAY: "starts anew",
    Reaction.BACKOFF: "again after 0.1 s, more slowly each time, up to 5 s",
    Reaction.INTERVAL: "again every 5 s, or disabled (`disable_on_error`)",
    Reaction.STOP: "stops until the subscription is altered",
}

# Classes defined in the module that raises them.
ELSEWHERE = [
    publisher_connection.PublisherUnreachable,
    lexer.StatementSyntaxError,
    connection_errors.ConnectError,
    ServersError,
]

# No worker gets these errors.
NO_WORKERS = (StatementError, ServersError, ChangeLogError)

STATES = """
## SQLSTATEs

What a server refuses keeps the server's SQLSTATE, which decides how a worker goes on, never a text. These are tried again
more and more slowly, without end, and never disable a subscription: {transient}. So are connections that are lost or refused.

Those of ours are PostgreSQL's. Two are not: `SB001`, raised on the target where a table has another shape than the worker
knows, which makes it look again; and `SB002`, where another session has moved the progress, so that this one cannot commit.
""".strip()


def page() -> str:
    rows = [
        [_name(error, depth), code(error.sqlstate), _says(error), _then(error)]
        for error, depth in _tree(SubscriberError)
    ]
    states = STATES.format(transient=", ".join(f"{code(state)}{'' if len(state) == 5 else '…'}" for state in TRANSIENT))
    return markdown.page("Errors", HEAD, markdown.table(["class", "SQLSTATE", "", "then"], rows), states)


def _tree(error: type[SubscriberError], depth: int = 0) -> Iterator[tuple[type[SubscriberError], int]]:
    yield error, depth
    for below in sorted(error.__subclasses__(), key=lambda error: error.__name__):
        if below.__module__.startswith("subscriber."):
            yield from _tree(below, depth + 1)


def _name(error: type[SubscriberError], depth: int) -> str:
    name = code(error.__name__)
    return "· " * depth + (f"**{name}**" if error.__name__ in subscriber.__all__ else name)


def _says(error: type[SubscriberError]) -> str:
    """Return the first paragraph of the docstring, and the advice of errors.py."""
    says = " ".join((inspect.getdoc(error) or "").split("\n\n")[0].split())
    remedy = re.search(rf"[─│└├ ]{error.__name__}  +.*?: (.*)", errors.__doc__ or "")
    assert says, f"{error} says nothing about itself"
    return f"{says.removesuffix('.')}. *{remedy[1][0].upper()}{remedy[1][1:]}.*" if remedy else says


def _then(error: type[SubscriberError]) -> str:
    if error is SubscriberError or issubclass(error, NO_WORKERS):
        return ""
    if error is ServerError:
        return "as the SQLSTATE says"
    return THEN[reaction(error.__new__(error))]
