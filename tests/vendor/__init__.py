"""What only servers as vendors package them show: JIT, ICU collations, translated messages."""
