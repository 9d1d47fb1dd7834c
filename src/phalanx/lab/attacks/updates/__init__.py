"""Attacks of sites on federated rounds: each is a function of a lying site's knowledge, in one table."""

from phalanx.lab.attacks.updates.table import UPDATE_ATTACKS, AttackerView, UpdateAttackEntry

__all__ = ["UPDATE_ATTACKS", "AttackerView", "UpdateAttackEntry"]
