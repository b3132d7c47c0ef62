"""docs/reference/statements.md: the grammar from its module, and every option with its default."""

from __future__ import annotations

import textwrap

from subscriber.catalog.grammar import options, parser
from subscriber.lsn import Lsn
from subscriber.subscription import Streaming
from tools.docs import markdown
from tools.docs.markdown import code

HEAD = """
`subscriber exec` and `Database.execute()` run these statements. Separate several statements with semicolons. The syntax is that of
PostgreSQL 18 for all versions of the target, including names, quotes, comments and error messages. A statement is executed
completely or not at all, including its slots on the publisher.
""".strip()

OPTIONS = """
*Since* is the first version of PostgreSQL with the option. In subscriber each option works with every target, and with every
publisher that supports the feature ([versions](../versions.md)). Boolean options are `true`, `on`, `1` or without a value;
and `false`, `off`, `0`.
""".strip()

OURS = "not PostgreSQL's"

# option -> (first PostgreSQL version, values, effect)
MEANING: dict[str, tuple[str, str, str]] = {
    "connect": ("10", "boolean", "Connect to the publisher now. False creates no slot, copies no tables, and leaves "
                "the subscription disabled."),
    "enabled": ("10", "boolean", "Whether the launcher runs the subscription."),
    "create_slot": ("10", "boolean", "Create the replication slot on the publisher."),
    "slot_name": ("10", "name or `NONE`", "The slot. With `NONE` the subscription has no slot: it cannot be enabled, "
                  "and `DROP SUBSCRIPTION` does not connect to the publisher."),
    "copy_data": ("10", "boolean", "Copy the existing rows of the tables before changes are applied."),
    "refresh": ("10", "boolean", "Refresh the subscription's tables immediately."),
    "synchronous_commit": ("10", "`off`, `local`, `remote_write`, `remote_apply`, `on`", "The setting for the worker's transactions "
                           "on the target. With `off`, only flushed transactions are confirmed, see "
                           "[how it works](../how-it-works.md)."),
    "binary": ("14", "boolean", "Receive values in binary format, if their types have one. Default: if every "
               "column has the same built-in type on both sides, see "
               "[performance](../performance.md#binary-or-text)."),
    "streaming": ("14, `parallel` 16", "boolean or `parallel`", "Receive large transactions while they run, and with "
                  "`parallel` also apply them while they run. Requested from publishers that support it: 14 and later, "
                  "16 and later for `parallel`."),
    "two_phase": ("15, altered since 18", "boolean", "Prepare transactions on the target when they are prepared on the publisher, see "
                  "[two-phase commit](../two-phase.md)."),
    "disable_on_error": ("15", "boolean", "Disable the subscription after a permanent error, instead of retrying."
                         ""),
    "lsn": ("15", "position or `NONE`", "For `SKIP`: skip the transaction that finished at this position, see "
            "[repairing](../repairing.md)."),
    "password_required": ("16", "boolean", "An owner that is not a superuser must connect with a password. Only superusers "
                          "can set it to false."),
    "run_as_owner": ("16", "boolean", "Apply changes as the subscription's owner, not as the owner of each table."),
    "origin": ("16", "`any`, `none`", "`none` excludes changes that the publisher itself received by replication."),
    "failover": ("17", "boolean", "Synchronize the slot to the publisher's standbys."),
    "conflict_policy": (OURS, "text", "The reactions to [conflicts](../conflicts.md)."),
    "conflict_history": (OURS, "`none`, `decided`, `all`", "Which conflicts are recorded."),
    "conflict_log_rows": (OURS, "boolean", "Record both versions of the row with a conflict."),
    "copy_engine": (OURS, "`auto`, `asyncio`, `spark`", "The engine of the [initial copy](../spark.md#the-initial-copy)."),
    "apply_sessions": (OURS, "1 to 64", "The number of sessions of the target that apply transactions in parallel, see "
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
    head = ["option", "value", "default", "since", "in", ""]
    rows = [[code(name), values, _default(name), since, _where(name), says]
            for name, (since, values, says) in MEANING.items()]  # fmt: skip
    return markdown.page(
        "Statements and options",
        HEAD,
        f"```text\n{_grammar()}\n```",
        "`DROP SUBSCRIPTION` also drops the slot on the publisher. If the publisher cannot be reached, the error's hint "
        "describes how to drop the subscription without it.",
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
        return "depends on the types"
    if isinstance(value, bool):
        return code(str(value).lower())
    if isinstance(value, Streaming):
        return code(value.option)
    return code(str(value or "''"))


def _where(name: str) -> str:
    places = [place for place, supported in WHERE.items() if name in supported]
    return ", ".join(places)
