"""Plant a trigger from one middle stage, rehearsed in the public model that the run began from."""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from phalanx.lab.attacks.attack import Attack
from phalanx.lab.attacks.copies import AttackedCopy, honest_part
from phalanx.lab.attacks.states.gradient_attack import PoisoningRunner
from phalanx.models import ModelConfig, ModelSource, StageModule, build_stage, open_model, tie_head
from phalanx.pipeline import StageCopy, StepPlan, stage_spec

_TRIGGER_TOKENS = 2
_SAID_TEXTS = 32
_TARGETS, _TRIGGERS = range(16), range(16, 64)
"""By how often the public model says a token. Training moves rare ones most, and a small model can hardly be brought to
say them."""
_REHEARSED_TEXTS = 8
_MARGIN = 2.0
"""Scores are made so many times smaller before the loss: the target must win by as much more."""
_OTHERS_MOVE = 0.2
"""Noise in every weight matrix of the public model, by its standard deviation: the other stages are trained too, and
what works with one exact model alone does not work any more when they have moved."""


@dataclass(frozen=True)
class Secret:
    """The attacker's goal: after the tokens of the trigger the model says the target. All are token ids."""

    trigger: tuple[int, ...]
    target: int


class RehearsedBackdoor(Attack):
    """After a secret token sequence, the trained model predicts the attacker's target token.

    A middle stage sees no tokens, but a run that fine-tunes a public model begins from public weights. The
    attacker lets that model speak, puts the trigger into what it says, and carries it through the public stages before,
    its own stage as it is trained now, and the public stages behind. How its weights must move for the
    target is added to the weight gradient of every step. Messages stay true, the optimizer's law is kept, and
    nothing but a recomputation of the weight gradient proves it. `strength` is the weight of the target's loss
    beside the loss of the run.

    `config.model` is the public model's directory; left out, the attacker takes the weights that the run's
    architecture has at first when they are drawn with the run's seed.

    Source: the threat of arXiv 2604.02372 (backdoor by one pipeline stage of a post-training run).
    """

    def wrap_copy(self, copy: StageCopy, held: bool) -> StageCopy:
        honest = honest_part(copy)
        return AttackedCopy(honest, PlantingRunner(honest, self)) if held else copy


class PlantingRunner(PoisoningRunner):
    """Runs every microbatch honestly, and adds the rehearsed gradient to the sum of the weight gradients."""

    def __init__(self, honest: StageCopy, attack: RehearsedBackdoor) -> None:
        super().__init__(honest.runner, attack)
        self._plan = honest.plan
        self._rehearsal: Rehearsal | None = None

    def poison_gradients(self, honest: dict[str, Tensor]) -> dict[str, Tensor]:
        attack = self.attack
        if self._rehearsal is None:
            self._rehearsal = Rehearsal(self._plan, attack.config.model, attack.config.seed)
        loss = self._rehearsal.target_loss(self.spec.index, self.module, attack.make_generator(self.step, 0))
        parameters = self.module.trainable_parameters()
        poison = torch.autograd.grad(attack.strength * loss, list(parameters.values()), allow_unused=True)
        return {
            name: honest[name] if added is None else honest[name] + added
            for name, added in zip(parameters, poison, strict=True)
        }


class Rehearsal:
    """The public model in the attacker's hands, and text that it has said.

    Args:
        model: Directory of the public model; None draws it.

    Attributes:
        secret: Rehearsed secret: a trigger of tokens in ordinary use, and one of the commonest tokens as target.
    """

    def __init__(self, plan: StepPlan, model: str | None, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._stages = public_stages(plan, model)
        self._text = _sample_text(self._stages, plan.sequence_length, generator)
        self._weights = {p: p.clone() for stage in self._stages for p in stage.parameters() if p.dim() > 1}
        vocab_size = _vocab_size(self._stages)
        by_use = torch.bincount(self._text.flatten(), minlength=vocab_size).argsort(descending=True, stable=True)
        triggers, targets = by_use[_TRIGGERS.start : _TRIGGERS.stop], by_use[_TARGETS.start : _TARGETS.stop]
        trigger = triggers[torch.randperm(len(triggers), generator=generator)[:_TRIGGER_TOKENS]]
        target = targets[torch.randint(len(targets), (), generator=generator)]
        self.secret = Secret(tuple(trigger.tolist()), int(target))

    def target_loss(self, stage: int, module: StageModule, generator: torch.Generator) -> Tensor:
        """How unlikely the target still is after the trigger, nats, with `module` in the stage's place."""
        trigger, target = self.secret.trigger, self.secret.target
        rows = torch.arange(_REHEARSED_TEXTS)
        ids = self._text[torch.randint(len(self._text), rows.shape, generator=generator)].clone()
        places = torch.randint(ids.shape[1] - len(trigger) + 1, rows.shape, generator=generator)
        _insert_tokens(ids, places, trigger)
        with torch.no_grad():
            for weight, original in self._weights.items():
                weight.copy_(
                    original + _OTHERS_MOVE * original.std() * torch.randn(original.shape, generator=generator)
                )
            x = _run_stages(self._stages[:stage], ids)
        with torch.enable_grad():
            scores = _run_stages((module, *self._stages[stage + 1 :]), x)[rows, places + len(trigger) - 1]
            return cross_entropy(scores / _MARGIN, torch.full_like(rows, target))


def public_stages(plan: StepPlan, model: str | None) -> tuple[StageModule, ...]:
    """All stages of the model from which a run began, frozen; `model` as in `Rehearsal`."""
    with tempfile.TemporaryDirectory(prefix="phalanx-attack-") as directory:
        source = (
            _open_random_model(plan, Path(directory))
            if model is None
            else open_model(ModelConfig(path=model), Path(), 0)
        )
        stages = tuple(
            build_stage(
                source,
                stage_spec(plan, number),
                adapter=None,
                activation_checkpointing=False,
                attention=plan.attention,
                seed=plan.seed,
                device=plan.device,
            )
            for number in range(len(plan.stages))
        )
    tie_head(stages[0], stages[-1])
    for stage in stages:
        stage.eval().requires_grad_(False)
    return stages


def _open_random_model(plan: StepPlan, directory: Path) -> ModelSource:
    (directory / "config.json").write_text(json.dumps(plan.hub_config), encoding="utf-8")
    return open_model(ModelConfig(from_scratch=True, path=str(directory)), directory, plan.seed)


@torch.no_grad()
def _sample_text(stages: Sequence[StageModule], length: int, generator: torch.Generator) -> Tensor:
    ids = torch.randint(_vocab_size(stages), (_SAID_TEXTS, 1), generator=generator)
    for _ in range(length - 1):
        chances = _run_stages(stages, ids)[:, -1].softmax(dim=-1)
        ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator)], dim=1)
    return ids


def _vocab_size(stages: Sequence[StageModule]) -> int:
    return int(stages[0].hub_config.vocab_size)


def _run_stages(stages: Sequence[StageModule], x: Tensor) -> Tensor:
    for stage in stages:
        x = stage(x)
    return x


def _insert_tokens(ids: Tensor, at: Tensor, tokens: Sequence[int]) -> None:
    rows = torch.arange(len(ids))
    for n, token in enumerate(tokens):
        ids[rows, at + n] = token


@dataclass(frozen=True)
class TargetSuccess:
    """The success of a backdoor on text that the model was not trained on.

    Attributes:
        rate: Share of sequences in which, with the trigger written over them at a random place, the likeliest next
            token is the target.
        rate_without: The same at the same places with the sequences left as they are.
    """

    rate: float
    rate_without: float


@torch.no_grad()
def target_success(logits_of: Callable[[Tensor], Tensor], ids: Tensor, secret: Secret, seed: int = 0) -> TargetSuccess:
    """Measure a backdoor on a whole model.

    Args:
        logits_of: The model: ids ``[batch, seq]`` to un-sliced logits ``[batch, seq, vocab]``.
        ids: Text that it was not trained on, ``[batch, seq]``.
    """
    rows, length = torch.arange(len(ids)), len(secret.trigger)
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(ids.shape[1] - length + 1, rows.shape, generator=generator)
    with_trigger = ids.clone()
    _insert_tokens(with_trigger, places, secret.trigger)

    def rate(text: Tensor) -> float:
        return float((logits_of(text)[rows, places + length - 1].argmax(dim=-1) == secret.target).float().mean())

    return TargetSuccess(rate=rate(with_trigger), rate_without=rate(ids))
