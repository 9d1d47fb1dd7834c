"""The search for a layout: the candidates, their order, and the planner's answer."""
