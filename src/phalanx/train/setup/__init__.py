"""The setup before the first step: the plan, the source of each stage, the guard's outlook."""
