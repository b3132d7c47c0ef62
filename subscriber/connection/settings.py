"""Settings that our sessions need, independent of postgresql.conf, the database and the role. See connect().

The built-in workers do not parse SQL, so most of these settings have no effect on them.
"""

from __future__ import annotations

from collections.abc import Mapping

from subscriber import server_features as features

# Of every session of ours but a walsender.
ALWAYS = {
    # A name without a schema could be an object that any role has made, whose code would run with the session's rights.
    "search_path": "",
    # Compiling a plan takes up to several seconds. Our statements take milliseconds, or as long compiled as not. The
    # apply session needs this most: its enable_seqscan = off makes a plan without an index cost 1e10 before
    # PostgreSQL 18, far above jit_above_cost.
    "jit": "off",
    # The usual way to keep others out of a database. The built-in workers write all the same.
    "default_transaction_read_only": "off",
    "default_transaction_deferrable": "off",
    # Others would fail where the built-in workers wait.
    "default_transaction_isolation": "read committed",
    # A refused attempt would end the session.
    "exit_on_error": "off",
    # How a statement or a name is read and printed.
    "standard_conforming_strings": "on",
    "quote_all_identifiers": "off",
    "transform_null_equals": "off",
    # How a value is read. NULL in an array would be the text "NULL", and xml without a root element an error.
    "array_nulls": "on",
    "xmloption": "content",
    # The views of schema "subscriber" would be closed to us.
    "restrict_nonsystem_relation_kind": "",
}

# For sessions that wait: for changes, locks, the end of a long copy. The built-in workers ignore statement_timeout
# and the idle timeouts. They obey lock_timeout and transaction_timeout, and repeat the same transaction without end.
NO_TIMEOUTS = {
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "transaction_timeout": "0",
}

# For sessions that read values as text, whose format must not depend on settings of a role or database.
EXACT_TEXT = {
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "timezone": "UTC",
    "lc_monetary": "C",
    "search_path": "pg_catalog",  # names of types, functions and tables have their schema
    "row_security": "off",
    **NO_TIMEOUTS,
    "lock_timeout": "10s",  # VACUUM FULL and ALTER TABLE may hold a lock for hours
}

# The version that brought a setting, as in server_version_num. Publishers may be older than those that are tested.
_SINCE = {
    "jit": features.JIT,
    "idle_session_timeout": features.IDLE_SESSION_TIMEOUT,
    "transaction_timeout": features.TRANSACTION_TIMEOUT,
}
# Minor releases brought these, by major version.
_SINCE_MINOR = {
    "restrict_nonsystem_relation_kind": {12: 120020, 13: 130016, 14: 140013, 15: 150008, 16: 160004},
}

# Keeps the transaction from reading a view, in releases since August 2024. A relation is looked up in the catalog and
# then read by its name. Its owner can keep it locked in between, and put a view in its place, whose functions would run
# with the rights of the session.
READ_NO_VIEW = (
    "SELECT pg_catalog.set_config(name, 'view', true) FROM pg_catalog.pg_settings"
    " WHERE name = 'restrict_nonsystem_relation_kind'"
)

# Set after the session has started: which of these exist depends on the server's version, and PgBouncer would refuse
# a session that requests them in its startup packet.
LATER = frozenset({*ALWAYS, *_SINCE})


def known(settings: Mapping[str, str], version: int) -> dict[str, str]:
    """Return the settings that a server knows. `version` is its server_version_num."""
    return {name: value for name, value in settings.items() if version >= _since(name, version)}


def _since(name: str, version: int) -> int:
    minor = _SINCE_MINOR.get(name)
    if minor is None:
        return _SINCE[name].since * 10_000 if name in _SINCE else 0
    return minor.get(version // 10_000, features.RESTRICTED_RELATION_KINDS.since * 10_000)
