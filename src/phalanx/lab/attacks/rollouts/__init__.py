"""Workers that lie about their texts or about their commitments."""

from phalanx.lab.attacks.rollouts.table import ROLLOUT_ATTACKS, make_liar

__all__ = ["ROLLOUT_ATTACKS", "make_liar"]
