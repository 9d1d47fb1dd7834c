"""Which layouts are looked at, in what order they come, and the planner's answer."""
