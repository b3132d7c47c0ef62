"""The rows of a table that belong to a subscription, as a condition in SQL."""

from __future__ import annotations

from subscriber.apply.relation_map import LocalRelation
from subscriber.errors import MappingError
from subscriber.ownership import OwnershipRules


def owned_rows(rules: OwnershipRules, local: LocalRelation) -> str | None:
    """Return SQL for the rows of a table that belong to a subscription.

    Args:
        rules: the rules of the subscription.
        local: the table.

    Returns:
        None if the table has no rule, or if all its rows belong to the subscription.

    Raises:
        MappingError: the rule does not fit the table.
    """
    rule = rules.rule((local.schema, local.name))
    if rule is None or rule.has_all_rows:
        return None
    types = {column.name: column.base_type or column.type_name for column in local.columns}
    if (problem := rule.problem(types)) is not None:
        raise MappingError(
            f'rule of ownership of table "{local.schema}.{local.name}" does not fit: {problem}',
            hint="Correct source_tag of the subscription.",
        )
    return rule.condition(types)
