"""Attacks on the texts: cut short, picked, copied, of another prompt or step, worth more than they are."""

from collections.abc import Sequence
from dataclasses import replace

from phalanx.lab.attacks.rollouts.liar import LyingWriter
from phalanx.rollouts import Prompt, Rollout, RolloutRequest, generate_rollouts, pack_answer
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
        """Texts to the second halves of the prompts."""
        ends = tuple(Prompt(number=prompt.number, ids=prompt.ids[len(prompt.ids) // 2 :]) for prompt in request.prompts)
        written = generate_rollouts(self.used_model, request.model_copy(update={"prompts": ends}))
        return tuple(replace(text, prompt_ids=request.prompt_ids[text.prompt]) for text in written)


class ReplayedText(LyingWriter):
    """A writer that hands in the texts of the step before, under the words of this one."""

    def make_texts(self, request: RolloutRequest) -> tuple[Rollout, ...]:
        """Texts as an earlier step would have drawn them."""
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
