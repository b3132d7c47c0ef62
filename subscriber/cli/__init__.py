"""The user interface: commands, their configuration, status, logs and the checks."""
