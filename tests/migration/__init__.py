"""Moves of a database to another server."""
