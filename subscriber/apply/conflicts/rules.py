"""ConflictRules: the conflict options of a subscription, as a session on the target uses them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from subscriber.apply.conflicts.policy import Policies, parse_policies
from subscriber.apply.conflicts.types import Conflict
from subscriber.apply.relation_map import LocalRelation
from subscriber.errors import ApplyError
from subscriber.protocol.messages import Delete, Insert, Update
from subscriber.sqlstate import UNDEFINED_FUNCTION
from subscriber.subscription import ConflictHistory, Subscription


class Resolver(Protocol):
    """An async function that decides about conflicts, for conflict_policy = 'call name'.

    It receives a Conflict and returns the name of a policy ("apply_remote", "keep_local", "last_update_wins",
    "error", …), or values, by column, for the row on the target. Texts are read as the server reads them, None is NULL,
    other values are converted with str(). A column that it leaves out keeps the publisher's value, or its own.

    It is awaited while the target's transaction is open and the rows are locked, and called again if the transaction
    has to be repeated. An exception stops the subscription until the next attempt, a few seconds later.
    """

    async def __call__(self, conflict: Conflict, /) -> str | Mapping[str, object]: ...


@dataclass(frozen=True, slots=True)
class ConflictRules:
    """The conflict options of a subscription.

    Attributes:
        policies: the conflict_policy.
        subid: OID of the subscription.
        kept: the conflicts that are recorded.
        with_rows: they are recorded with their rows.
        resolvers: every function that the policies name.
        decide: some changes read the target before they are applied.
        retain_dead_tuples: the target remembers deleted rows for the subscription.
    """

    policies: Policies = field(default_factory=lambda: Policies({}, {}))
    subid: int = 0
    kept: ConflictHistory = ConflictHistory.NONE
    with_rows: bool = False
    resolvers: Mapping[str, Resolver] = field(default_factory=dict)
    decide: bool = False
    retain_dead_tuples: bool = False

    def concern(self, local: LocalRelation, kind: type) -> bool:
        """Return True if a change of this class (Insert, Update, Delete) reads the target before it is applied."""
        if not self.decide:
            return False
        noticed = kind is not Insert and self.kept is ConflictHistory.ALL
        return noticed or self.policies.concern((local.schema, local.name), kind)

    def concern_table(self, local: LocalRelation) -> bool:
        """Return True if some changes of the table read the target before they are applied."""
        return any(self.concern(local, kind) for kind in (Insert, Update, Delete))


NO_RULES = ConflictRules()


def conflict_rules(subscription: Subscription, resolvers: Mapping[str, Resolver]) -> ConflictRules:
    """Return the rules of a subscription.

    Args:
        subscription: has the options.
        resolvers: the functions that a conflict_policy may call, by name.

    Raises:
        ApplyError: a policy names a function that is not in `resolvers`. SQLSTATE 42883.
    """
    policies = parse_policies(subscription.conflict_policy)
    for name in sorted(policies.functions - resolvers.keys()):
        raise ApplyError(
            f'conflict resolver "{name}" of subscription "{subscription.name}" is not registered',
            hint="Run the subscription in a program that registers it, with running(resolvers=...), or give the"
            " subscription another conflict_policy.",
            sqlstate=UNDEFINED_FUNCTION,
        )
    return ConflictRules(
        policies,
        subscription.oid,
        subscription.conflict_history,
        subscription.conflict_log_rows,
        resolvers,
        subscription.decides_conflicts,
        subscription.retain_dead_tuples,
    )
