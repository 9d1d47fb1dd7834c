"""What layouts are compared with: torch's own optimizers in one process, and no engine."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rank_layouts import BATCH, TOKENS, Case, architecture
from torch import nn
from torch.nn.utils import clip_grad_norm_

from phalanx.data import IGNORE
from phalanx.models import (
    CAUSAL,
    AttentionPattern,
    LoraConfig,
    ModelConfig,
    ModelSource,
    PrefixConfig,
    PromptEncoderConfig,
    SlicedAdapter,
    StageSpec,
    add_embedding_noise,
    build_stage,
    open_model,
)
from phalanx.models.master_weights import keep_masters
from phalanx.objectives import causal_lm_loss
from phalanx.optimizers import OptimizerConfig, learning_rate
from phalanx.parallel.model.recompute import fuse_activations

MOVEMENTS_BLOCK = 1024
"""Numbers of a movement that share a unit."""


def optimizer_of(case: Case) -> OptimizerConfig:
    if case.adapted is not None:
        return OptimizerConfig(
            kind="sgd", lr=0.2, warmup_steps=3, clip_norm=1e6, weight_decay=0.01, schedule="wsd", decay_share=0.5
        )
    if case.optimizer == "sgd":
        # nothing is clipped: a wrong scale of the whole gradient would show as well
        return OptimizerConfig(kind="sgd", lr=0.1, warmup_steps=3, clip_norm=1e6, weight_decay=0.01)
    if case.optimizer == "adafactor":
        return OptimizerConfig(kind="adafactor", lr=5e-2, warmup_steps=3, clip_norm=0.5, schedule="linear")
    return OptimizerConfig(lr=5e-3, warmup_steps=3, clip_norm=0.5)


def adapter_of(case: Case) -> SlicedAdapter | None:
    if case.adapted is None:
        return None
    if case.adapter == "ptuning":
        return PrefixConfig(kind="ptuning", tokens=3)
    if case.adapter == "prompt_encoder":
        return PromptEncoderConfig(kind="prompt_encoder", tokens=3, encoder="lstm", encoder_size=8)
    # a loud adapter on every layer is chaotic: a weight moved by 1e-7 moves the last losses by 3e-5
    alpha = 8 if case.adapted else 32
    if case.adapter == "rslora":
        # alpha / sqrt(rank) where others have alpha / rank: with the same alpha it is twice as loud, and its weights
        # moved by one unit in the last place move the norm of the 14th step by 3.5e-4, in one process alone
        alpha //= 2
    config = LoraConfig(rank=4, alpha=alpha, targets=case.adapted)
    return config.model_copy(update={case.adapter: True}) if case.adapter in ("dora", "rslora") else config


def batch_of(step: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens, with another number of targets in each row; two batches take turns, so that both are learnt."""
    generator = torch.Generator().manual_seed(77 + step % 2)
    tokens = torch.randint(0, vocab, (BATCH, TOKENS + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, :5] = IGNORE
    labels[3, 9:] = IGNORE
    return tokens[:, :-1].contiguous(), labels


def seen_of(case: Case, step: int) -> dict[str, torch.Tensor]:
    """What rows say of their attention: documents, three tokens of ten beginning one, or lengths of prefixes."""
    generator = torch.Generator().manual_seed(11 + step % 2)
    if case.attends == "documents":
        return {"documents": (torch.rand((BATCH, TOKENS), generator=generator) < 0.3).cumsum(dim=1)}
    if case.attends == "prefix":
        return {"prefix": torch.randint(0, TOKENS + 1, (BATCH,), generator=generator)}
    return {}


def source_of(case: Case, cache: Path) -> ModelSource:
    config = ModelConfig(from_scratch=True, architecture=architecture(case.family, case.vocab))
    return open_model(config, cache, seed=3)


def one_process(case: Case, cache: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step; islands are models of their own, joined by torch's own Nesterov steps."""
    islands = [_Island(case, cache) for _ in range(case.islands)]
    outer = case.parallel.get("outer")
    anchors = [nn.Parameter(p.detach().clone()) for p in islands[0].trained]
    joining = None if outer is None else _nesterov(anchors, outer["lr"], outer["momentum"])
    curve = []
    for step in range(case.steps):
        ids, labels = batch_of(step, case.vocab)
        seen = [
            {name: rows.chunk(len(islands))[at] for name, rows in seen_of(case, step).items()}
            for at in range(len(islands))
        ]
        rows = zip(islands, ids.chunk(len(islands)), labels.chunk(len(islands)), seen, strict=True)
        found = [island.step(step, x, y, of_rows) for island, x, y, of_rows in rows]
        loss = sum(total for total, _ in found) / int((labels != IGNORE).sum())
        curve.append((loss, (sum(norm**2 for _, norm in found) / len(found)) ** 0.5))
        if joining is not None and (step + 1) % outer["every"] == 0:
            _join(islands, anchors, joining)
    return curve


class _Island:
    def __init__(self, case: Case, cache: Path) -> None:
        self.attends, self.steps, self.parts = case.attends, case.steps, case.router_parts
        source, self.config = source_of(case, cache), optimizer_of(case)
        spec = StageSpec(0, 1, 0, source.num_layers)
        adapter = adapter_of(case)
        self.model = build_stage(
            source, spec, adapter=adapter, activation_checkpointing=False, attention="sdpa", seed=0
        )
        add_embedding_noise(self.model, case.noise)
        if case.precision == "bf16_weights":
            keep_masters(self.model)
        self.model.router_share = 1 / self.parts
        self.trained = list(self.model.trainable_parameters().values())
        self.unsent: list[torch.Tensor] = []
        if case.rounds_movements:
            # what differs in a last bit may be rounded to another byte: the microbatches and the kernels of ranks
            self.parts = case.microbatches
            fuse_activations(self.model)
            self.unsent = [torch.zeros_like(p) for p in self.trained]
        self.optimizer = torch_optimizer(self.trained, self.config, fused=case.rounds_movements)

    def step(
        self, step: int, ids: torch.Tensor, labels: torch.Tensor, seen: dict[str, torch.Tensor]
    ) -> tuple[float, float]:
        """Summed loss, and the norm before clipping."""
        pattern = CAUSAL if self.attends == "causal" else AttentionPattern(self.attends, **seen)
        if self.model.embedding_noise is not None:
            self.model.embedding_noise.begin_step(0, step)
        total, count = torch.zeros((), dtype=torch.float64), int((labels != IGNORE).sum())
        for x, y in zip(ids.chunk(self.parts), labels.chunk(self.parts), strict=True):
            loss, _ = causal_lm_loss(self.model(x, pattern), y)
            (loss / count).backward()
            total += loss.detach()
            for name, parameter in self.model.computing.items():
                master, wide = self.model.masters[name], parameter.grad.float()
                master.grad, parameter.grad = wide if master.grad is None else master.grad + wide, None
        clip = clip_as_ranks if self.unsent else clip_grad_norm_
        norm = float(clip(self.trained, self.config.clip_norm or 1e9))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, step, self.steps)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(total), norm

    @torch.no_grad()
    def send_movement(self, number: int, anchor: torch.Tensor) -> torch.Tensor:
        """What a parameter has moved since the anchor; where it is sent as bytes, with what earlier ones lacked."""
        moved = anchor - self.trained[number]
        if not self.unsent:
            return moved
        moved += self.unsent[number]
        sent = rounded(moved.reshape(-1), MOVEMENTS_BLOCK).view_as(moved)
        self.unsent[number] = moved - sent
        return sent


def torch_optimizer(
    trained: list[nn.Parameter], config: OptimizerConfig, *, fused: bool = False
) -> torch.optim.Optimizer:
    """Torch's optimizer; with `fused` AdamW by the kernel that ranks have, whose last bits are others."""
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.kind == "sgd":
        return torch.optim.SGD(groups, lr=1.0, momentum=config.momentum)
    if config.kind == "adafactor":
        return torch.optim.Adafactor(groups, lr=1.0)
    return torch.optim.AdamW(groups, lr=1.0, betas=config.betas, eps=config.eps, fused=fused)


@torch.no_grad()
def clip_as_ranks(trained: Sequence[nn.Parameter], clip_norm: float, second: Sequence[nn.Parameter] = ()) -> float:
    """Return the norm before clipping: of each tensor in float32 and of all in float64.

    Args:
        trained: Parameters that are clipped.
        second: Those of them that are copies of others, and do not count.
    """
    counted = [p for p in trained if not any(p is other for other in second)]
    norm = math.sqrt(sum(float(torch.linalg.vector_norm(p.grad)) ** 2 for p in counted))
    for parameter in trained:
        parameter.grad.mul_(min(1.0, clip_norm / (norm + 1e-6)))
    return norm


def _nesterov(anchors: list[nn.Parameter], lr: float, momentum: float) -> torch.optim.SGD:
    return torch.optim.SGD(anchors, lr=lr, momentum=momentum, nesterov=momentum > 0)


@torch.no_grad()
def _join(islands: list[_Island], anchors: list[nn.Parameter], joining: torch.optim.SGD) -> None:
    for number, anchor in enumerate(anchors):
        anchor.grad = sum(island.send_movement(number, anchor) for island in islands) / len(islands)
    joining.step()
    for island in islands:
        for parameter, anchor in zip(island.trained, anchors, strict=True):
            parameter.copy_(anchor)


def rounded(row: torch.Tensor, size: int) -> torch.Tensor:
    """Round numbers as they are sent: each to a whole number of units of its block, the even one where two are near."""
    numbers, units = row.numpy(), units_of(row, size).numpy()
    whole = np.rint(np.divide(numbers, units, out=np.zeros_like(numbers), where=units > 0))
    return torch.from_numpy(whole * units)


def units_of(row: torch.Tensor, size: int) -> torch.Tensor:
    """The unit of each number: a 127th of the largest of its block."""
    units = np.empty_like(row.numpy())
    for start in range(0, len(row), size):
        units[start : start + size] = np.abs(row.numpy()[start : start + size]).max() / np.float32(127)
    return torch.from_numpy(units)
