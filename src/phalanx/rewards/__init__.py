"""Rewards of sampled texts: rules, a reward model, a judge, or the user's own function, each behind a time limit."""

from phalanx.rewards.config import REWARDS, RewardConfig, RewardsConfig, RewardSettings
from phalanx.rewards.scorer import RewardScorer, ScoredText

__all__ = [
    "REWARDS",
    "RewardConfig",
    "RewardScorer",
    "RewardSettings",
    "RewardsConfig",
    "ScoredText",
]
