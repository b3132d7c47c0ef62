"""Definitions of a database, copied to another server.

`pg_dump` reads the definitions and `pg_restore` prints them. This package chooses the statements and their order, and
executes them on sessions of its own.

    programs.py         pg_dump and pg_restore of a version that fits both servers
    archive.py          the definitions of the source, as an archive of pg_dump
    roles.py            roles, their memberships and settings, the settings and privileges of the database
    restore.py          the statements of an archive on the target: before the copy, and after it
    code_owners.py      the roles of statements that run code
    upkeep.py           materialized views and ANALYZE
    large_objects.py    large objects, which logical replication does not publish

Order:

    1. create_roles()                   a transaction
    2. restore_definitions()            a transaction: pre-data, primary keys, indexes of replica identities; workers
                                        with copy_indexes = after build keys after the copy
    3. the initial copy
    4. restore_rest()                   a transaction for each object
    5. refresh_materialized_views()     a transaction for each view
    6. analyze()                        a transaction for each table
    7. copy_large_objects()             a transaction for each object; once more when the source accepts no writes

Failure cases:

- The process is killed within a transaction: the server rolls back. Each function skips the objects that exist, so a
  repeated call continues.
- The process is killed after a commit: the next call finds the object.
- DDL on the source between the calls: restore_rest() reads the definitions again. A column of a table that exists on
  the target is not added. schema_diff() finds it.
- A table of the target exists before restore_definitions(): an error, and nothing is created.

The source decides which statements the target executes: a role that can create a function there can also write code
that runs on the target when the function is called. No text of the source reaches a shell or psql.
"""
