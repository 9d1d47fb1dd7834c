"""Texts for training by workers that are not trusted: a draw is a public function, and a share is read again."""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names
from phalanx.rollouts.config import RolloutCheck, RolloutsConfig, RolloutWorkerConfig
from phalanx.rollouts.request import Prompt, RolloutRequest, SamplerConfig
from phalanx.rollouts.verdict import RolloutDismissal, RolloutTolerance, RolloutVerdict

if TYPE_CHECKING:
    from phalanx.rollouts.generate import generate_rollouts
    from phalanx.rollouts.judgement import BorderBook, judge_age, judge_reward, judge_rollout, judge_texts
    from phalanx.rollouts.policy import PolicyModel, ReadTexts, RolloutPolicy
    from phalanx.rollouts.prefill import RereadRollout, reread_rollouts
    from phalanx.rollouts.processes import local_rollout_workers, rollout_company
    from phalanx.rollouts.rollout import Rollout, pack_answer
    from phalanx.rollouts.share import CheckedShare
    from phalanx.rollouts.worker import RolloutWriter, run_rollout_worker

__all__ = [
    "BorderBook",
    "CheckedShare",
    "PolicyModel",
    "Prompt",
    "ReadTexts",
    "RereadRollout",
    "Rollout",
    "RolloutCheck",
    "RolloutDismissal",
    "RolloutPolicy",
    "RolloutRequest",
    "RolloutTolerance",
    "RolloutVerdict",
    "RolloutWorkerConfig",
    "RolloutWriter",
    "RolloutsConfig",
    "SamplerConfig",
    "generate_rollouts",
    "judge_age",
    "judge_reward",
    "judge_rollout",
    "judge_texts",
    "local_rollout_workers",
    "pack_answer",
    "reread_rollouts",
    "rollout_company",
    "run_rollout_worker",
]


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
