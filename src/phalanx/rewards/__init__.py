"""Rewards of sampled texts: rules, a reward model, a judge, or the user's own function, each behind a time limit."""

from phalanx.rewards.config import RewardsConfig as RewardsConfig
from phalanx.rewards.scorer import RewardScorer as RewardScorer, ScoredText as ScoredText
