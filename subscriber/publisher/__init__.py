"""The publisher: its slots, publications and tables, and the stream of changes."""
