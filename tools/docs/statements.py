"""docs/reference/statements.md: the grammar from its module, and every option from the table of options."""

from __future__ import annotations

import math
import textwrap

from subscriber.catalog.grammar import parser
from subscriber.subscription import OPTIONS, OptionStatement, Streaming, SubscriptionOption
from tools.docs import markdown
from tools.docs.markdown import code

HEAD = """
`subscriber exec` and `Database.execute()` run these statements. Separate several statements with semicolons. The syntax is that of
PostgreSQL 18 for all versions of the target, including names, quotes, comments and error messages. A statement is executed
completely or not at all, including its slots on the publisher.
""".strip()

OPTIONS_HEAD = """
*Since* is the first version of PostgreSQL with the option. In subscriber each option works with every target, and with every
publisher that supports the feature ([versions](../versions.md)). Boolean options are `true`, `on`, `1` or without a value;
and `false`, `off`, `0`.
""".strip()

OURS = "not PostgreSQL's"

# What to read about an option besides its row in the table of options.
SEE = {
    "synchronous_commit": "[how it works](../how-it-works.md)",
    "binary": "[performance](../performance.md#binary-or-text)",
    "two_phase": "[two-phase commit](../two-phase.md)",
    "lsn": "[repairing](../repairing.md)",
    "on_error": "[quarantine](../quarantine.md)",
    "quarantine_limit": "[quarantine](../quarantine.md#limits)",
    "conflict_policy": "[conflicts](../conflicts.md)",
    "copy_engine": "[copying](../copying.md)",
    "apply_sessions": "[performance](../performance.md#several-sessions)",
    "trusted_owners": "[security](../security.md#code-of-the-target)",
}


def page() -> str:
    assert SEE.keys() <= OPTIONS.keys(), f"no options: {SEE.keys() - OPTIONS.keys()}"
    # PostgreSQL's options by version, then the others.
    names = sorted(OPTIONS, key=lambda name: OPTIONS[name].since or math.inf)
    head = ["option", "value", "default", "since", "in", ""]
    return markdown.page(
        "Statements and options",
        HEAD,
        f"```text\n{_grammar()}\n```",
        "`DROP SUBSCRIPTION` also drops the slot on the publisher. If the publisher cannot be reached, the error's hint "
        "describes how to drop the subscription without it.",
        "## Options",
        OPTIONS_HEAD,
        markdown.table(head, [_row(name, OPTIONS[name]) for name in names]),
    )


def _grammar() -> str:
    assert parser.__doc__
    return textwrap.dedent(parser.__doc__.split("\n\n")[1])


def _row(name: str, option: SubscriptionOption) -> list[str]:
    since = OURS if option.since is None else ", ".join(filter(None, [str(option.since), option.since_text]))
    effect = f"{option.effect} See {SEE[name]}." if name in SEE else option.effect
    statements = ", ".join(_words(statement) for statement in option.statements)
    return [code(name), option.value.description, _default(option), since, statements, effect]


def _words(statement: OptionStatement) -> str:
    return ", ".join(code(words) for words in statement.split(", "))


def _default(option: SubscriptionOption) -> str:
    value = option.default
    if option.default_text:
        return option.default_text
    if isinstance(value, bool):
        return code(str(value).lower())
    if isinstance(value, Streaming):
        return code(value.option)
    return code(str(value or "''"))
