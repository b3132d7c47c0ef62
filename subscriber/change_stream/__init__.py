"""The change stream for programs: transactions, changes, values; pulled, or pushed into callbacks."""
