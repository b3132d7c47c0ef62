"""What a person touches: commands, configuration, status, logs, demo."""
