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
from subscriber.retry import TRANSIENT, Reaction, reaction
from tools.docs import markdown
from tools.docs.markdown import code

HEAD = """
All errors that subscriber raises are of class `subscriber.SubscriberError`. It has the same parts as PostgreSQL's errors:

- `message`: one line.
- `detail`: facts, in sentences; None if there are none.
- `hint`: advice, in sentences, with its commands; None if there is none.
- `command`: the exact next command, a statement or a command of a shell; None if there is none.
- `alternative`: another way, as a [`Remedy`](python.md#subscriberremedy); None if there is none.
- `remedy`: the hint as a `Remedy`, whose fields are `advice`, `command`, `then` and `alternative`.
- `sqlstate`: five characters.
- `context`: lines, the innermost first.

These texts contain no values of rows. The exception is the text of a server's own error, in `ServerError`.

A command prints them on stderr as psql does and exits 3:

```text
ERROR:  subscription "shop" does not exist
```

Classes in bold can be imported from `subscriber`; catch these. The other classes are raised as well; to catch one of them, catch
the bold class above it. Column *then* is the reaction of a subscription's worker, after the error is logged and shown in
`subscriber status`.
""".strip()

THEN = {
    Reaction.IMMEDIATE: "retries immediately",
    Reaction.SHORT_DELAY: "restarts after a short delay",
    Reaction.BACKOFF: "retries after 0.1 s, with longer delays each time, up to 5 s",
    Reaction.INTERVAL: "retries every 5 s, or is disabled (`disable_on_error`)",
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

A server's error keeps its SQLSTATE. The SQLSTATE decides the worker's reaction, never the text. These errors are retried without
limit, with increasing delays, and never disable a subscription: {transient}. So are lost and refused connections.

Our own errors have PostgreSQL's SQLSTATEs, with two exceptions on the target. `SB001`: a table's definition has changed since the
worker read it; the worker reads it again. `SB002`: another session has moved the progress, so this session cannot commit.
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
    assert says, f"{error} has no docstring"
    return f"{says.removesuffix('.')}. *{remedy[1][0].upper()}{remedy[1][1:]}.*" if remedy else says


def _then(error: type[SubscriberError]) -> str:
    if error is SubscriberError or issubclass(error, NO_WORKERS):
        return ""
    if error is ServerError:
        return "depends on the SQLSTATE"
    return THEN[reaction(error.__new__(error))]
