"""Move a database to another server: its definitions, its rows, and its applications."""
