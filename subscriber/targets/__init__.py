"""Where changes go: what a target has to do (`base`), and PostgreSQL as one (`postgres`)."""
