"""Texts for training by workers that are not trusted: a draw is a public function, and a share is read again."""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names
from phalanx.rollouts.config import (
    RolloutCheck as RolloutCheck,
    RolloutsConfig as RolloutsConfig,
    RolloutWorkerConfig as RolloutWorkerConfig,
)
from phalanx.rollouts.request import Prompt as Prompt, RolloutRequest as RolloutRequest, SamplerConfig as SamplerConfig
from phalanx.rollouts.verdict import (
    RolloutDismissal as RolloutDismissal,
    RolloutTolerance as RolloutTolerance,
    RolloutVerdict as RolloutVerdict,
)

if TYPE_CHECKING:
    from phalanx.rollouts.company import RolloutCompany as RolloutCompany
    from phalanx.rollouts.generate import generate_rollouts as generate_rollouts
    from phalanx.rollouts.judgement import (
        BorderTally as BorderTally,
        judge_age as judge_age,
        judge_reward as judge_reward,
        judge_rollout as judge_rollout,
        judge_texts as judge_texts,
    )
    from phalanx.rollouts.policy import (
        PolicyModel as PolicyModel,
        ReadTexts as ReadTexts,
        RolloutPolicy as RolloutPolicy,
    )
    from phalanx.rollouts.prefill import RereadRollout as RereadRollout, reread_rollouts as reread_rollouts
    from phalanx.rollouts.processes import (
        local_rollout_workers as local_rollout_workers,
        rollout_company as rollout_company,
    )
    from phalanx.rollouts.rollout import Rollout as Rollout, pack_answer as pack_answer
    from phalanx.rollouts.share import CheckedShare as CheckedShare
    from phalanx.rollouts.worker import RolloutWriter as RolloutWriter, run_rollout_worker as run_rollout_worker


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
