"""The subscriptions of one target database: their tables, and the statements that change them."""
