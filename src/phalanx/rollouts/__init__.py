"""Texts for training by workers that are not trusted: a draw is a public function, and a share is read again."""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names
from phalanx.rollouts.request import Prompt, RolloutRequest, SamplerConfig

if TYPE_CHECKING:
    from phalanx.rollouts.generate import generate_rollouts
    from phalanx.rollouts.policy import PolicyModel, RolloutPolicy
    from phalanx.rollouts.prefill import RereadRollout, reread_rollouts
    from phalanx.rollouts.rollout import Rollout, RolloutAnswer, misfit, pack_answer, unpack_answer

__all__ = [
    "PolicyModel",
    "Prompt",
    "RereadRollout",
    "Rollout",
    "RolloutAnswer",
    "RolloutPolicy",
    "RolloutRequest",
    "SamplerConfig",
    "generate_rollouts",
    "misfit",
    "pack_answer",
    "reread_rollouts",
    "unpack_answer",
]


if not TYPE_CHECKING:
    __getattr__ = late_names(
        __name__,
        {
            "generate": ("generate_rollouts",),
            "policy": ("PolicyModel", "RolloutPolicy"),
            "prefill": ("RereadRollout", "reread_rollouts"),
            "rollout": ("Rollout", "RolloutAnswer", "misfit", "pack_answer", "unpack_answer"),
        },
    )
