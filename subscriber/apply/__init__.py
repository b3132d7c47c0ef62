"""What a change means: pure decisions, without a clock, a network or a log."""
