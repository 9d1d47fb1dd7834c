"""The table of attacks on rollouts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.lab.attacks.rollouts.liar import LyingWriter
from phalanx.rollouts import Prompt, Rollout, RolloutPolicy, RolloutRequest, generate_rollouts, pack_answer
from phalanx.rollouts.verdict import DismissalCause, RolloutOffence
from phalanx.rollouts.worker import Answer

_DRAWS = 4


class TruncatedText(LyingWriter):
    """A writer that ends every text halfway, as a policy with less to say would have: thinking costs it time."""

    def make_texts(self, request: RolloutRequest) -> tuple[Rollout, ...]:
        """The first half of each text, and an end."""
        if not request.ends:
            return super().make_texts(request)
        half = request.sampler.model_copy(update={"max_new_tokens": max(1, request.sampler.max_new_tokens // 2)})
        written = generate_rollouts(self.used_model, request.model_copy(update={"sampler": half}))
        return tuple(
            text if text.finish == "stop" else replace(text, ids=(*text.ids[:-1], request.ends[0]), finish="stop")
            for text in written
        )


class BestOfSeveral(LyingWriter):
    """A writer that draws each text several times, and hands in the one with the most of a token that is liked."""

    def make_texts(self, request: RolloutRequest) -> tuple[Rollout, ...]:
        """The best of several draws; the first of these is the honest one."""
        several = [
            generate_rollouts(self.used_model, request.model_copy(update={"seed": (request.seed + n) % 2**63}))
            for n in range(_DRAWS)
        ]
        return tuple(max(draws, key=lambda one: len(set(one.ids))) for draws in zip(*several, strict=True))


class CopiedText(LyingWriter):
    """A writer that writes one text for each prompt, and hands it in for all."""

    def make_texts(self, request: RolloutRequest) -> tuple[Rollout, ...]:
        """The first text of each prompt, under every number."""
        first = generate_rollouts(self.used_model, request.model_copy(update={"samples": 1}))
        return tuple(replace(text, sample=sample) for text in first for sample in range(request.samples))


class WrongPrompt(LyingWriter):
    """A writer that reads only the end of each prompt."""

    def make_texts(self, request: RolloutRequest) -> tuple[Rollout, ...]:
        ends = tuple(Prompt(number=prompt.number, ids=prompt.ids[len(prompt.ids) // 2 :]) for prompt in request.prompts)
        written = generate_rollouts(self.used_model, request.model_copy(update={"prompts": ends}))
        return tuple(replace(text, prompt_ids=request.prompt_ids[text.prompt]) for text in written)


class ReplayedText(LyingWriter):
    """A writer that hands in the texts of the step before, under the words of this one."""

    def make_texts(self, request: RolloutRequest) -> tuple[Rollout, ...]:
        return generate_rollouts(self.used_model, request.model_copy(update={"step": max(0, request.step - 1)}))


class InventedReward(LyingWriter):
    """A writer that says that every text earns the most."""

    def make_texts(self, request: RolloutRequest) -> tuple[Rollout, ...]:
        """Honest texts with a reward of 1."""
        return tuple(replace(text, reward=1.0) for text in super().make_texts(request))


class TwoAnswers(LyingWriter):
    """A writer that signs two different answers to one request."""

    def write_answers(self, request: RolloutRequest) -> Sequence[Answer]:
        """An honest answer, and another one."""
        honest = super().make_texts(request)
        other = generate_rollouts(self.used_model, request.model_copy(update={"seed": (request.seed + 1) % 2**63}))
        return [pack_answer(request, honest), pack_answer(request, other)]


class WrongTemperature(LyingWriter):
    """A writer that draws a tenth colder than it was asked to."""

    def make_texts(self, request: RolloutRequest) -> tuple[Rollout, ...]:
        sampler = request.sampler.model_copy(update={"temperature": 0.9 * request.sampler.temperature})
        return generate_rollouts(self.used_model, request.model_copy(update={"sampler": sampler}))


class ChangedTopP(LyingWriter):
    """A writer that leaves unlikely tokens out: its texts look better, and are not the policy's."""

    def make_texts(self, request: RolloutRequest) -> tuple[Rollout, ...]:
        sampler = request.sampler.model_copy(update={"top_p": 0.9 * request.sampler.top_p})
        return generate_rollouts(self.used_model, request.model_copy(update={"sampler": sampler}))


_LEVELS = 127
_NOISE = 0.05


class OtherModel(LyingWriter):
    """A writer with a sibling of the policy: every weight matrix is off by a twentieth of its spread."""

    def replace_policy(self, policy: RolloutPolicy) -> RolloutPolicy:
        generator = torch.Generator().manual_seed(0)

        def moved(one: Tensor) -> Tensor:
            noise = torch.randn(one.shape, generator=generator).to(one.dtype)
            return one + _NOISE * one.std() * noise

        return RolloutPolicy(policy.config, {k: moved(v) if v.ndim > 1 else v for k, v in policy.tensors.items()})


class Int8Weights(LyingWriter):
    """A writer with the policy in int8: one scale a row, the usual way to halve memory."""

    def replace_policy(self, policy: RolloutPolicy) -> RolloutPolicy:
        """Weights rounded to 8 bits."""
        return RolloutPolicy(
            policy.config, {k: rounded_to_int8(v) if v.ndim > 1 else v for k, v in policy.tensors.items()}
        )


class StalePolicy(LyingWriter):
    """A writer that still uses the weights that it got first."""

    def __init__(self, *, careful: bool = True) -> None:
        super().__init__(careful=careful)
        self._first: RolloutPolicy | None = None

    def replace_policy(self, policy: RolloutPolicy) -> RolloutPolicy:
        if self._first is None:
            self._first = RolloutPolicy(policy.config, {k: v.clone() for k, v in policy.tensors.items()})
        return self._first


def rounded_to_int8(weight: Tensor) -> Tensor:
    """Round to 8 bits, one scale a row."""
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / _LEVELS
    return (weight / scale).round() * scale


@dataclass(frozen=True)
class RolloutAttackEntry:
    """One line of the table.

    Attributes:
        liar: Writes instead of an honest worker.
        careless: Offence or dismissal of a careless liar.
        careful: Offence or dismissal of a liar with honest commitments; its tokens give it away.
    """

    liar: type[LyingWriter]
    careless: RolloutOffence | DismissalCause
    careful: RolloutOffence | DismissalCause


ROLLOUT_ATTACKS: dict[str, RolloutAttackEntry] = {
    "other_model": RolloutAttackEntry(OtherModel, "sketch", "draw"),
    "int8_weights": RolloutAttackEntry(Int8Weights, "sketch", "draw"),
    "stale_policy": RolloutAttackEntry(StalePolicy, "sketch", "draw"),
    "wrong_temperature": RolloutAttackEntry(WrongTemperature, "logprob", "draw"),
    "changed_top_p": RolloutAttackEntry(ChangedTopP, "draw", "draw"),
    "truncated_text": RolloutAttackEntry(TruncatedText, "logprob", "draw"),
    "best_of_several": RolloutAttackEntry(BestOfSeveral, "draw", "draw"),
    "copied_text": RolloutAttackEntry(CopiedText, "draw", "draw"),
    "wrong_prompt": RolloutAttackEntry(WrongPrompt, "sketch", "draw"),
    "replayed_text": RolloutAttackEntry(ReplayedText, "draw", "draw"),
    "invented_reward": RolloutAttackEntry(InventedReward, "reward", "reward"),
    "two_answers": RolloutAttackEntry(TwoAnswers, "equivocation", "equivocation"),
}


def make_liar(kind: str, *, careful: bool = True) -> LyingWriter:
    """Build a worker that lies."""
    if kind not in ROLLOUT_ATTACKS:
        raise ConfigError(f"attack: found {kind!r}; choices: {', '.join(sorted(ROLLOUT_ATTACKS))}")
    return ROLLOUT_ATTACKS[kind].liar(careful=careful)
