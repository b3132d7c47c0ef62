"""The statements that read and write the tables of schema `subscriber`, a module for each table.

A function sends one statement on an asyncpg connection, and is part of the connection's transaction, if it has one.
Positions are sent as text, so the connection may have any codecs. The SQL is in constants, because the
apply worker sends some statements on a session of its own, and because a test prepares each of them in a migrated
database.
"""
