"""Which parties take part: how they join, are measured, come back and leave."""
