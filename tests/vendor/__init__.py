"""Features of servers as packaged by vendors: JIT, ICU collations, translated messages."""
