"""The parallel benches: what layouts of ranks cost beside one process, other frameworks and the planner's estimate."""
