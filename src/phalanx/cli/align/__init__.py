"""``phalanx align``: training data by principles, refusals, and values."""
