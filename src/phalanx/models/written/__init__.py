"""Families that are written out: their whole models do what no line of facts says. One file a family."""
