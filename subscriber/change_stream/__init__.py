"""The change stream for programs: transactions, changes and values, by iteration or through callbacks."""
