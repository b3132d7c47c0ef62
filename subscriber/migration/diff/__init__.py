"""Differences between the definitions of two databases, read from their catalogs.

    catalog.py          the objects of one database: kind, name, attributes, and the statement that creates each
    difference.py       the comparison of two catalogs, and the statements that repair the differences; pure
    schema_diff.py      schema_diff(): reads both databases and compares them

Servers of different versions print some expressions differently. If the texts of an expression differ, the target
parses both in a temporary view and prints them again. The transaction is rolled back.
"""
