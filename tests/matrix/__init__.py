"""Every supported version of PostgreSQL as publisher and as target, in pairs."""
