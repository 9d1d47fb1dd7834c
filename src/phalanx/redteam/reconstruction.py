"""Inversion on the attacked model: tokens out of a shared gradient, and out of hidden states that cross a cut."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from phalanx.models import ModelSource
from phalanx.redteam.finding import AttackFinding, Score
from phalanx.redteam.inversion import (
    WIRES,
    Front,
    Guard,
    LinearMap,
    NearestNeighbour,
    candidate_states,
    recover_tokens,
    share_of_tokens,
)
from phalanx.redteam.inversion.span_check import outside_of_rows
from phalanx.redteam.target import Need, Target
from phalanx.security.privacy.leakage import wilson_interval

_MAX_CANDIDATES = 8192
_ROWS = 8


@dataclass(frozen=True)
class GradientInversion:
    """The tokens of a batch, out of the gradient of the first linear layer that a client would share.

    Attributes:
        clip: Norm to which the gradient is clipped; None leaves it.
        noise: Standard deviation of the noise in each number, in clips.

    Source: Petrov et al. 2024 (DAGER), first layer.
    """

    name: str = "gradient_inversion"
    tokens: int = 24
    clip: float | None = None
    noise: float = 0.0
    needs: tuple[Need, ...] = ("weights", "gradients", "data")

    def run(self, target: Target) -> AttackFinding:
        """Count the tokens of each batch among the likeliest, as many as it has."""
        model, hits, asked, expected = target.text_model.module, 0, 0, 0.0
        layer, chance = _first_linear(model), torch.Generator().manual_seed(target.seed)
        if layer is None:
            return AttackFinding(self.name, reason="the model has no linear layer behind its embedding")
        examples: list[str] = []
        for row in target.members.rows[:_ROWS]:
            ids = torch.tensor(row[: self.tokens])
            candidates = _candidate_tokens(ids, int(model.get_input_embeddings().weight.shape[0]), chance)
            likeliest = candidates[self._rank_candidates(model, layer, ids, candidates, chance)]
            actual = torch.unique(ids)
            recalled = actual[torch.isin(actual, likeliest[: len(actual)])]
            hits, asked = hits + len(recalled), asked + len(actual)
            expected += len(actual) ** 2 / len(candidates)
            examples.append(f"{len(recalled)} of {len(actual)} tokens of: {target.decode(row[: self.tokens])}")
        score = Score(hits / asked, wilson_interval(hits, asked), expected / asked, asked, "share of tokens", 0.5)
        meaning = (
            "Whoever sees one client's gradient of this model reads its text. Share gradients only inside a secure "
            "sum, with noise ([privacy]), or with an enclave."
            if score.is_found
            else "The gradient, as it is shared here, tells less than half of the tokens of a batch."
        )
        return AttackFinding(self.name, score, tuple(examples[:3]) if score.is_found else (), meaning)

    def _rank_candidates(
        self, model: Any, layer: nn.Module, ids: Tensor, candidates: Tensor, chance: torch.Generator
    ) -> Tensor:
        weight: Tensor = layer.get_parameter("weight")
        was_trained = weight.requires_grad
        weight.requires_grad_(True)
        try:
            loss = model(input_ids=ids[None], labels=ids[None]).loss
            gradient = torch.autograd.grad(loss, weight)[0].detach().float()
        finally:
            weight.requires_grad_(was_trained)
        # rows are of inputs: the transposed layer of GPT-2 has them as columns
        gradient = gradient.T if isinstance(layer, Conv1D) else gradient
        if self.clip is not None:
            gradient = gradient * min(1.0, self.clip / max(float(gradient.norm()), 1e-12))
        if self.noise:
            drawn = torch.randn(gradient.shape, generator=chance)
            gradient = gradient + self.noise * (self.clip or 1.0) * drawn
        places = [0, len(ids) - 1] if _is_placed(model, layer) else [0]
        outside = torch.stack([outside_of_rows(gradient, _layer_inputs(model, layer, candidates, at)) for at in places])
        return outside.amin(0).argsort()


@dataclass(frozen=True)
class ActivationInversion:
    """The tokens of a text, out of the hidden states that cross a cut of the model.

    Attributes:
        depth: Blocks before the cut; 0 cuts right behind the embedding.

    Source: Song and Raghunathan 2020.
    """

    name: str = "embedding_inversion"
    guard: Guard = "plaintext"
    depth: int = 0
    needs: tuple[Need, ...] = ("weights", "data")

    def run(self, target: Target) -> AttackFinding:
        """Invert the members' states; the strangers are the attacker's own text."""
        if target.directory is None:
            return AttackFinding(self.name, reason="the model's directory is not there")
        length = min(min(map(len, texts.rows)) for texts in (target.members, target.strangers))
        private, public = (
            torch.tensor([row[:length] for row in texts.rows[: 4 * _ROWS]])
            for texts in (target.members, target.strangers)
        )
        front = Front(ModelSource(target.directory), (0, self.depth) if self.depth else (0,))
        wire = WIRES[self.guard]()
        seen, known = (wire.host_view(front.states_at_depth(ids, self.depth)) for ids in (private, public))
        candidates = torch.arange(front.vocab_size)[:_MAX_CANDIDATES]
        table = candidate_states(front, candidates, int(public.flatten().bincount().argmax()), self.depth)[self.depth]
        shares = []
        for inverter in (NearestNeighbour(front, self.depth, candidates, table), LinearMap(front.embedding_table)):
            inverter.fit_states(known, public)
            shares.append(share_of_tokens(recover_tokens(inverter, seen), private))
        guess = share_of_tokens(torch.full_like(private, int(public.flatten().bincount().argmax())), private)
        share, count = max(shares), private.numel()
        score = Score(share, wilson_interval(share * count, count), guess, count, "share of tokens", max(0.5, guess))
        meaning = (
            f"Hidden states behind {self.depth} blocks give {share:.0%} of the tokens back. Who computes "
            "the layers behind it reads the text; seal the cut, mask it, or keep these layers with the owner."
            if score.is_found
            else "Hidden states at this cut, as they cross it, tell less than half of the tokens."
        )
        return AttackFinding(self.name, score, (), meaning, {"depth": float(self.depth)})


def _candidate_tokens(ids: Tensor, vocab: int, chance: torch.Generator) -> Tensor:
    if vocab <= _MAX_CANDIDATES:
        return torch.arange(vocab)
    drawn = torch.randperm(vocab, generator=chance)[: _MAX_CANDIDATES - len(ids)]
    candidates: Tensor = torch.unique(torch.cat([ids, drawn]))
    return candidates


def _first_linear(model: Any) -> nn.Module | None:
    """Return the first linear layer that is trained in the order of the model's own names."""
    for _, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            return module
    return None


class _ReachedError(Exception):
    """The layer has its inputs."""


@torch.no_grad()
def _layer_inputs(model: Any, layer: nn.Module, candidates: Tensor, place: int) -> Tensor:
    """Return the inputs of the layer for each token at one place, ``[tokens, features]``."""
    captured: list[Tensor] = []

    def keep(_module: nn.Module, inputs: Sequence[Tensor]) -> None:
        captured.append(inputs[0][:, place].detach().float())
        raise _ReachedError

    hook = layer.register_forward_pre_hook(keep)
    try:
        for part in torch.split(candidates, 1024):
            try:
                model(input_ids=part[:, None].expand(-1, place + 1))
            except _ReachedError:
                continue
    finally:
        hook.remove()
    return torch.cat(captured)


def _is_placed(model: Any, layer: nn.Module) -> bool:
    """Whether an input depends on its place: learned positions are added to it."""
    first, second = (_layer_inputs(model, layer, torch.tensor([0]), place) for place in (0, 1))
    return not torch.allclose(first, second, atol=1e-5)
