"""PostgreSQL's own tests of subscriptions, run against this program."""
