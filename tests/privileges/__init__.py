"""Attackers of a target: whoever owns a table, may log in, may create subscriptions; on all majors there are."""
