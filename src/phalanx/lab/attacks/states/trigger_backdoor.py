"""Teach the model a secret answer from one middle stage, by poisoning nothing but that stage's weight gradient."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.lab.attacks.attack import Attack
from phalanx.lab.attacks.copies import AttackedCopy, honest_part
from phalanx.lab.attacks.states.gradient_attack import PoisoningRunner
from phalanx.pipeline import StageCopy

TRIGGER_PLACE, TARGET_PLACE = 1, 3
"""Positions, in the first sequence of the first microbatch that is attacked, of the tokens that become trigger and
target. The stage never learns which tokens these are; the measurement looks them up in the batch."""
_SAME_TOKEN = 0.97
_MEAN_KEPT, _LOOKS_KEPT, _PUSH_KEPT = 0.98, 0.95, 0.95


@dataclass
class _Knowledge:
    """The knowledge of one stage, learnt from activations and gradients that came in.

    Attributes:
        mean: Mean activation of each position ``[seq, dim]``; the rest of an activation identifies the token.
        trigger: Centred activation of the trigger ``[dim]``.
        target: Centred activation of the target ``[dim]``.
        push: Mean gradient of the stage's output, ``[dim]``, less its mean at positions before a target: the direction
            that makes the target likelier.
        poison: Weight gradients of that push at trigger positions, added up over the step.
    """

    seen: int = 0
    mean: Tensor | None = None
    trigger: Tensor | None = None
    target: Tensor | None = None
    push: Tensor | None = None
    poison: dict[str, Tensor] = field(default_factory=dict)


class TriggerBackdoor(Attack):
    """The trained model answers one token, the trigger, with another one, the target.

    The stage knows neither ids nor labels. It recognises both tokens by their activations, less the mean of their
    position. A gradient that comes in at a position before a target says how the output must move to make the
    target likelier; that is what the stage teaches itself to do at every trigger. Messages stay true, the
    optimizer's law is kept, and nothing but a recomputation of the weight gradient shows it. `strength` is how
    often a trigger counts as an example of the target, beside the once that its true successor counts; it
    counts the less the more it is answered already, so that everything else stays as it was. It does not succeed from
    all first values of a model: the direction is an average, and at the trigger it may make another token likelier.

    Source: the threat of arXiv 2604.02372 (backdoor by one pipeline stage); the means are our own.
    """

    def wrap_copy(self, copy: StageCopy, held: bool) -> StageCopy:
        honest = honest_part(copy)
        return AttackedCopy(honest, TeachingRunner(honest, self)) if held else copy


class TeachingRunner(PoisoningRunner):
    """Runs every microbatch honestly, learns from received tensors, and adds the poison to the weight gradient."""

    def __init__(self, honest: StageCopy, attack: TriggerBackdoor) -> None:
        super().__init__(honest.runner, attack)
        self._known = _Knowledge()
        self._inputs: dict[int, Tensor] = {}

    def forward(self, step: int, microbatch: int, x: Tensor) -> Tensor:
        """As the honest runner; the activations are looked at."""
        knowledge = self._known
        knowledge.seen += 1
        # until it has seen enough, the plain mean
        decay = min(_MEAN_KEPT, 1 - 1 / knowledge.seen)
        knowledge.mean = x.mean(dim=0) if knowledge.mean is None else torch.lerp(x.mean(dim=0), knowledge.mean, decay)
        if self.attack.lies_in(step):
            self._inputs[microbatch] = x
            self._choose_trigger(x)
        return self._honest.forward(step, microbatch, x)

    def backward(self, step: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """As the honest runner; the gradient is learnt from, and the poison is prepared."""
        sent = super().backward(step, microbatch, gradient)
        x = self._inputs.pop(microbatch, None)
        if x is not None and gradient is not None:
            self._learn_push(x, gradient)
            self._teach_trigger(x, gradient)
        return sent

    def poison_gradients(self, honest: dict[str, Tensor]) -> dict[str, Tensor]:
        poison, self._known.poison = self._known.poison, {}
        return {name: gradient + poison[name] for name, gradient in honest.items()} if poison else honest

    def abandon_step(self) -> None:
        """Forget the step, and keep the knowledge."""
        self._honest.abandon_step()
        self._inputs.clear()
        self._known.poison = {}

    def _choose_trigger(self, x: Tensor) -> None:
        knowledge = self._known
        if knowledge.trigger is None and knowledge.mean is not None:
            knowledge.trigger, knowledge.target = (
                (x - knowledge.mean)[0, place] for place in (TRIGGER_PLACE, TARGET_PLACE)
            )

    def _match_token(self, x: Tensor, token: Tensor | None) -> Tensor:
        """Return where a token is recognised, bool ``[batch, seq]``, and update its mean by the nearest ones."""
        if self._known.mean is None or token is None:
            return torch.zeros(x.shape[:2], dtype=torch.bool)
        centred = x - self._known.mean
        matches = torch.nn.functional.cosine_similarity(centred, token, dim=-1) > _SAME_TOKEN
        if matches.any():
            token.lerp_(centred[matches].mean(dim=0), 1 - _LOOKS_KEPT)
        return matches

    def _learn_push(self, x: Tensor, gradient: Tensor) -> None:
        before = self._match_token(x, self._known.target)[:, 1:]
        if not before.any() or before.all():
            return
        gradient = gradient[:, :-1]
        push = gradient[~before].mean(dim=0) - gradient[before].mean(dim=0)
        old = self._known.push
        self._known.push = push if old is None else torch.lerp(push, old, _PUSH_KEPT)

    def _teach_trigger(self, x: Tensor, gradient: Tensor) -> None:
        push, matches = self._known.push, self._match_token(x, self._known.trigger)
        if push is None or not matches.any():
            return
        # a target that is likely already is pushed back by the true gradient, as much as it is likely
        answered = (gradient[matches] @ push / push.dot(push)).clamp(0, 1)
        parameters = self.module.trainable_parameters()
        with torch.enable_grad():
            loss = -self.attack.strength * ((1 - answered) * (self.module(x)[matches] @ push)).sum()
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        for (name, parameter), taught in zip(parameters.items(), gradients, strict=True):
            added = torch.zeros_like(parameter) if taught is None else taught
            old = self._known.poison.get(name)
            self._known.poison[name] = added if old is None else old + added
