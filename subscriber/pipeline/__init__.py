"""Bulk work on Spark: the copy of large tables, comparing both sides, the change history. Extra `spark`."""
