"""Attacks on the rule of the draw: another temperature, or a narrower choice."""

from phalanx.lab.attacks.rollouts.liar import LyingWriter
from phalanx.rollouts import Rollout, RolloutRequest, generate_rollouts


class WrongTemperature(LyingWriter):
    """A writer that draws a tenth colder than it was asked to."""

    def make_texts(self, request: RolloutRequest) -> tuple[Rollout, ...]:
        """Texts at nine tenths of the temperature."""
        sampler = request.sampler.model_copy(update={"temperature": 0.9 * request.sampler.temperature})
        return generate_rollouts(self.used_model, request.model_copy(update={"sampler": sampler}))


class ChangedTopP(LyingWriter):
    """A writer that leaves unlikely tokens out: its texts look better, and are not the policy's."""

    def make_texts(self, request: RolloutRequest) -> tuple[Rollout, ...]:
        """Texts from nine tenths of the share."""
        sampler = request.sampler.model_copy(update={"top_p": 0.9 * request.sampler.top_p})
        return generate_rollouts(self.used_model, request.model_copy(update={"sampler": sampler}))
