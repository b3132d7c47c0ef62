"""All supported versions of PostgreSQL as publisher and as target, in pairs."""
