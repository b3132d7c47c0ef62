"""Connections to PostgreSQL: libpq's connection strings, connecting, and a session of our own."""
