"""Which large objects belong to schema `subscriber`: those that its owner has, with content that only it writes.

The schema stores the durable rows of its tables in large objects (migrations/schema.sql, section 1). Their
numbers are high. The server's counter reaches these numbers too, and any program may choose one. So a number proves
nothing.

    prg1 …                        the progress of a worker, with its row as JSON at PROGRESS_ROW
    {"row": …, "table": "NAME"}   a row of table NAME
    del1 …                        deleted rows
    qtn1 …                        changes in quarantine
"""

from __future__ import annotations

PROGRESS_ROW = 20  # bytes before the row in a progress record

# For `m`, a row of pg_largeobject_metadata; false without a schema. A role that may not read the objects of the
# schema's owner takes all of them in the range for the schema's.
IS_OWN = f"""
coalesce((SELECT CASE
    WHEN n.nspowner <> m.lomowner THEN false
    WHEN NOT pg_catalog.pg_has_role(n.nspowner, 'USAGE') THEN m.oid BETWEEN 3400000000 AND 4289999999
    WHEN pg_catalog.lo_get(m.oid, 0, 4) = 'prg1' THEN pg_catalog.lo_get(m.oid, {PROGRESS_ROW}, 7) = '{{"row":'
    WHEN pg_catalog.lo_get(m.oid, 0, 4) IN ('del1', 'qtn1') THEN m.oid BETWEEN 3400000000 AND 4289999999
    WHEN pg_catalog.lo_get(m.oid, 0, 8) = '{{"row": ' THEN EXISTS (
        SELECT FROM pg_catalog.pg_class c WHERE c.relnamespace = n.oid AND pg_catalog.position(
            pg_catalog.lo_get(m.oid), pg_catalog.convert_to(', "table": "' || c.relname || '"}}', 'UTF8')) > 0)
    ELSE false END FROM pg_catalog.pg_namespace n WHERE n.nspname = 'subscriber'), false)
""".strip()
