"""A router of assignments, whose consumers act once on messages that are delivered at least once."""
