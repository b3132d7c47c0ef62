"""Attackers of a target: owners of tables, login roles, owners of subscriptions; on all available major versions."""
