"""docs/reference/statements.md: the grammar from its module, and every option with its default."""

from __future__ import annotations

import textwrap

from subscriber.catalog.grammar import options, parser
from subscriber.lsn import Lsn
from subscriber.subscription import Streaming
from tools.docs import markdown
from tools.docs.markdown import code

HEAD = """
`subscriber exec` and `Database.execute()` run these statements, several of them separated by semicolons. They are spelt
as in PostgreSQL 18, whatever the version of the target; names, quotes, comments and error messages are PostgreSQL's too.
A statement is done whole or not at all, slots on the publisher included.
""".strip()

OPTIONS = """
*Since* is the version of PostgreSQL that has the option first; here each works with every target, and with those
publishers that can do what it asks for ([versions](../versions.md)). Boolean options are `true`, `on`, `1`, or nothing at
all; and `false`, `off`, `0`.
""".strip()

OURS = "not PostgreSQL's"

# option -> (first PostgreSQL version, values, effect)
MEANING: dict[str, tuple[str, str, str]] = {
    "connect": ("10", "boolean", "Connect to the publisher now. False creates nothing there, copies nothing, and leaves "
                "the subscription disabled."),
    "enabled": ("10", "boolean", "Let the launcher run it."),
    "create_slot": ("10", "boolean", "Create the replication slot on the publisher."),
    "slot_name": ("10", "name or `NONE`", "The slot. `NONE` leaves it to others: such a subscription cannot be enabled, "
                  "and `DROP SUBSCRIPTION` does not touch the publisher."),
    "copy_data": ("10", "boolean", "Copy what the tables have, before changes are applied to them."),
    "refresh": ("10", "boolean", "Look for the tables of the new publications at once."),
    "synchronous_commit": ("10", "`off`, `local`, `remote_write`, `remote_apply`, `on`", "Of the worker's transactions on "
                           "the target. With `off` what is confirmed is flushed all the same, see "
                           "[how it works](../how-it-works.md)."),
    "binary": ("14", "boolean", "Have values sent in binary form, where their types have one. Not said: as long as every "
               "column has the same built-in type on both sides, see "
               "[performance](../performance.md#binary-or-text)."),
    "streaming": ("14, `parallel` 16", "boolean or `parallel`", "Receive large transactions while they run, and with "
                  "`parallel` apply them meanwhile. Asked of publishers that can do it: 14 and later, 16 and later for "
                  "`parallel`."),
    "two_phase": ("15, altered since 18", "boolean", "Prepare on the target what is prepared on the publisher, see "
                  "[two-phase commit](../two-phase.md)."),
    "disable_on_error": ("15", "boolean", "Disable the subscription instead of trying again, at errors that do not go "
                         "away by themselves."),
    "lsn": ("15", "position or `NONE`", "Of `SKIP`: the transaction that finished at this position is passed over, see "
            "[repairing](../repairing.md)."),
    "password_required": ("16", "boolean", "An owner who is no superuser has to connect with a password. Only superusers "
                          "set it to false."),
    "run_as_owner": ("16", "boolean", "Apply changes as the subscription's owner, not as the owner of each table."),
    "origin": ("16", "`any`, `none`", "`none` leaves out what the publisher itself received by replication."),
    "failover": ("17", "boolean", "Have the slot kept on the publisher's standbys."),
    "conflict_policy": (OURS, "text", "What is done about [conflicts](../conflicts.md)."),
    "conflict_history": (OURS, "`none`, `decided`, `all`", "Which conflicts are recorded."),
    "conflict_log_rows": (OURS, "boolean", "Record both versions of the row with a conflict."),
    "copy_engine": (OURS, "`auto`, `asyncio`, `spark`", "Who makes the [initial copy](../spark.md#the-initial-copy)."),
    "apply_sessions": (OURS, "1 to 64", "In how many sessions of the target transactions are applied side by side, see "
                       "[performance](../performance.md#several-sessions). They commit in the publisher's order."),
    "trusted_owners": (OURS, "roles, separated by commas", "Owners of tables and functions whose code may run with all "
                       "rights of the role that applies changes, see [security](../security.md#code-of-the-target). For "
                       "superusers only."),
}  # fmt: skip

WHERE = {
    "`CREATE`": options.FOR_CREATE,
    "`SET`": options.FOR_SET,
    "`SET`, `ADD`, `DROP PUBLICATION`": options.FOR_PUBLICATIONS,
    "`REFRESH PUBLICATION`": options.FOR_REFRESH,
    "`SKIP`": options.FOR_SKIP,
}


def page() -> str:
    known = frozenset[str]().union(*WHERE.values())
    assert known == set(MEANING), f"explain or remove: {known ^ set(MEANING)}"
    head = ["option", "is", "default", "since", "in", ""]
    rows = [[code(name), values, _default(name), since, _where(name), says]
            for name, (since, values, says) in MEANING.items()]  # fmt: skip
    return markdown.page(
        "Statements and options",
        HEAD,
        f"```text\n{_grammar()}\n```",
        "`DROP SUBSCRIPTION` drops the slot on the publisher, too; when that cannot be reached, the error says how to go "
        "on without it.",
        "## Options",
        OPTIONS,
        markdown.table(head, rows),
    )


def _grammar() -> str:
    assert parser.__doc__
    return textwrap.dedent(parser.__doc__.split("\n\n")[1])


def _default(name: str) -> str:
    value = getattr(options.Options(), name)
    if name == "slot_name":
        return "the subscription's name"
    if isinstance(value, Lsn):
        return "required"
    if name == "binary":
        return "what the types allow"
    if isinstance(value, bool):
        return code(str(value).lower())
    if isinstance(value, Streaming):
        return code(value.option)
    return code(str(value or "''"))


def _where(name: str) -> str:
    places = [place for place, supported in WHERE.items() if name in supported]
    return ", ".join(places)
