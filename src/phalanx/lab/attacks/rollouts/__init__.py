"""Workers that lie about the texts that they write, or about what they commit to."""

from phalanx.lab.attacks.rollouts.table import ROLLOUT_ATTACKS, make_liar

__all__ = ["ROLLOUT_ATTACKS", "make_liar"]
