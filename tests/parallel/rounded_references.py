"""What ranks that round are compared with: the same rounding of the same pieces in one process, and no engine.

A sharing group of ranks holds each tensor in equal parts of its rows. One message is a rank's parts of all tensors of a
module: of a block, or of everything of a stage that is in no block. Blocks of 256 numbers of a message share a unit.
"""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from rank_layouts import Case
from references import batch_of, clip_as_ranks, optimizer_of, rounded, source_of, torch_optimizer, units_of
from torch import Tensor, nn

from phalanx.data import IGNORE
from phalanx.models import StageModule, StageSpec, build_stage, estimate_costs, partition_layers
from phalanx.objectives import causal_lm_loss
from phalanx.optimizers import learning_rate
from phalanx.parallel.model.recompute import fuse_activations

BLOCK = 256
BFLOAT16_HALF_PLACE = 2.0**-9
"""A number is rounded to bfloat16 by at most this share of itself."""


class RoundedStep(NamedTuple):
    """One step of a run that rounds.

    Attributes:
        norm: Of the gradient that ranks have after they have exchanged it.
        exact_loss: Loss of the weights as the optimizer has them, not rounded.
        reach: How far rounding can move that loss, to first order: the sum of the gradient's sizes, each times half the
            unit by which its weight is rounded.
    """

    loss: float
    norm: float
    exact_loss: float
    reach: float


class _Message:
    """The tensors of one message of a sharing group, and the parts that the optimizer has of them."""

    def __init__(self, tensors: list[nn.Parameter], shares: int) -> None:
        self.tensors = tensors
        self.parts = [[nn.Parameter(part.clone()) for part in self._cut(one, shares)] for one in tensors]
        self.shares = shares

    def of_rank(self, share: int) -> Tensor:
        """Return what a rank has of the weights, in one row."""
        return torch.cat([parts[share].detach().reshape(-1) for parts in self.parts])

    def rows(self, values: list[Tensor]) -> list[Tensor]:
        """Return what of some values belongs to each rank, in one row each."""
        cut = [self._cut(value.float(), self.shares) for value in values]
        return [torch.cat([parts[share].reshape(-1) for parts in cut]) for share in range(self.shares)]

    def whole(self, rows: list[Tensor]) -> list[Tensor]:
        """Return the tensors of such rows."""
        sizes = [parts[0].numel() for parts in self.parts]
        cut = [row.split(sizes) for row in rows]
        return [torch.cat([row[n] for row in cut]).view_as(one) for n, one in enumerate(self.tensors)]

    def set_gradients(self, rows: list[Tensor]) -> None:
        """Give each rank's parts its row of the gradient."""
        for share, row in enumerate(rows):
            of_parts = row.split([parts[share].numel() for parts in self.parts])
            for parts, gradient in zip(self.parts, of_parts, strict=True):
                parts[share].grad = gradient.view_as(parts[share]).clone()

    @staticmethod
    def _cut(value: Tensor, shares: int) -> tuple[Tensor, ...]:
        assert len(value) % shares == 0, "rows that are filled up are not tried here"
        return value.detach().chunk(shares)


class RoundedRun:
    """A run with ``gradient_compression`` "int8" or "int8_gathers", of all its ranks one after the other."""

    def __init__(self, case: Case, cache: Path) -> None:
        parallel = case.parallel
        self.case, self.config = case, optimizer_of(case)
        self.replicas = parallel.get("replicas", 1)
        self.copies = parallel["dp"]
        self.shares = self.copies // self.replicas
        self.narrow = torch.bfloat16 if case.precision == "bf16_weights" else torch.float32
        source = source_of(case, cache)
        embedding, head = estimate_costs(source.hub_config)
        specs = partition_layers(source.num_layers, parallel.get("pp", 1), None, embedding, head)
        self.stages = [self._build(source, spec) for spec in specs]
        self.messages = [
            _Message(tensors, self.shares) for stage in self.stages for tensors in _tensors_of_messages(stage)
        ]
        for message in self.messages:
            for tensor in message.tensors:
                tensor.data = tensor.detach().to(self.narrow)
        self.trained = [part for message in self.messages for parts in message.parts for part in parts]
        self.optimizer = torch_optimizer(self.trained, self.config, fused=True)

    def step(self, step: int) -> RoundedStep:
        """Make one step."""
        ids, labels = batch_of(step, self.case.vocab)
        count = int((labels != IGNORE).sum())
        self._set_weights([[message.of_rank(n) for n in range(self.shares)] for message in self.messages])
        with torch.no_grad():
            exact_loss = float(self._loss(ids, labels))
        distances = self._gather()
        rows = zip(ids.chunk(self.copies), labels.chunk(self.copies), strict=True)
        of_copies = [self._summands(x, y, count) for x, y in rows]
        summed_loss = sum(loss for loss, _ in of_copies)
        exchanges = [exchange for _, of_copy in of_copies for exchange in of_copy]
        # before anything is rounded
        gradient = [torch.stack(rows) / self.copies for rows in _added(exchanges)]
        reach = sum(float((g.abs() * far).sum()) for g, far in zip(gradient, distances, strict=True))
        groups = [of_copies[first : first + self.shares] for first in range(0, self.copies, self.shares)]
        of_groups = [
            _added([self._exchange(of_ranks) for of_ranks in zip(*(sent for _, sent in group), strict=True)])
            for group in groups
        ]
        for message, rows in zip(self.messages, _added(of_groups), strict=True):
            message.set_gradients([row / self.replicas for row in rows])
        return RoundedStep(summed_loss / count, self._update(step), exact_loss / count, reach)

    def _build(self, source, spec: StageSpec) -> StageModule:
        stage = build_stage(source, spec, adapter=None, activation_checkpointing=False, attention="sdpa", seed=0)
        fuse_activations(stage)
        return stage

    def _gather(self) -> list[Tensor]:
        """Let all ranks have the rounded weights; returns how far each may have moved, ``[ranks, numbers]``."""
        gathered, distances = [], []
        for message in self.messages:
            rows = [message.of_rank(share).to(self.narrow).float() for share in range(self.shares)]
            gathered.append([rounded(row, BLOCK) for row in rows])
            distances.append(torch.stack([units_of(row, BLOCK) for row in rows]) / 2)
            if self.narrow != torch.float32:
                distances[-1] += BFLOAT16_HALF_PLACE * torch.stack(gathered[-1]).abs()
        self._set_weights(gathered)
        return distances

    @torch.no_grad()
    def _set_weights(self, of_messages: list[list[Tensor]]) -> None:
        for message, rows in zip(self.messages, of_messages, strict=True):
            for tensor, value in zip(message.tensors, message.whole(rows), strict=True):
                tensor.copy_(value)

    def _loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = ids
        for stage in self.stages:
            hidden = stage(hidden if stage.spec.is_first else hidden.to(self.narrow)).float()
        return causal_lm_loss(hidden, labels)[0]

    def _summands(self, ids: Tensor, labels: Tensor, count: int) -> tuple[float, list[list[list[Tensor]]]]:
        """Summed loss of a copy, and of each of its exchanges, each message and each rank the row that is for it."""
        parts, loss, rounds = self.case.microbatches, 0.0, []
        # a pipeline exchanges once, others after each microbatch
        is_pipeline = len(self.stages) > 1
        for x, y in zip(ids.chunk(parts), labels.chunk(parts), strict=True):
            total = self._loss(x, y)
            (total * (self.copies / count)).backward()
            loss += float(total.detach())
            if not is_pipeline:
                rounds.append(self._pop_gradients())
        return loss, rounds or [self._pop_gradients()]

    def _pop_gradients(self) -> list[list[Tensor]]:
        rows = [message.rows([tensor.grad for tensor in message.tensors]) for message in self.messages]
        for stage in self.stages:
            stage.zero_grad()
        return rows

    def _exchange(self, of_ranks: tuple[list[list[Tensor]], ...]) -> list[list[Tensor]]:
        """The mean over a sharing group, for each message and rank: one's own summand is exact."""
        rounds = self.case.parallel["gradient_compression"] == "int8"
        return [
            [
                sum(
                    (rounded(rows[mine], BLOCK) if rounds else rows[mine] for n, rows in enumerate(sent) if n != mine),
                    sent[mine][mine],
                )
                / self.shares
                for mine in range(self.shares)
            ]
            for sent in zip(*of_ranks, strict=True)
        ]

    def _update(self, step: int) -> float:
        second = self._join_tied() if len(self.stages) > 1 else []
        norm = clip_as_ranks(self.trained, self.config.clip_norm or math.inf, second)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, step, self.case.steps)
        self.optimizer.step()
        return norm

    def _join_tied(self) -> list[nn.Parameter]:
        """Add up the gradients of a tied head and its embedding at the other end; returns the head's parts."""
        first, last = self.stages[0], self.stages[-1]
        assert first.ties_head
        ends = (first.get_parameter(first.family.embedding_weight), last.get_parameter(last.family.head_weight))
        embedding, head = (
            next(m.parts[n] for m in self.messages for n, one in enumerate(m.tensors) if one is end) for end in ends
        )
        for mine, theirs in zip(embedding, head, strict=True):
            mine.grad.add_(theirs.grad)
            theirs.grad.copy_(mine.grad)
        return head


def rounded_process(case: Case, cache: Path) -> list[RoundedStep]:
    """All steps of a run that rounds."""
    run = RoundedRun(case, cache)
    return [run.step(step) for step in range(case.steps)]


def _added(of_rounds: list[list[list[Tensor]]]) -> list[list[Tensor]]:
    """The sums of several exchanges, for each message and rank."""
    return [[sum(rest, first) for first, *rest in zip(*rows, strict=True)] for rows in zip(*of_rounds, strict=True)]


def _tensors_of_messages(stage: StageModule) -> list[list[nn.Parameter]]:
    """The tensors of each block, and those that are in none, in the order of the modules."""
    blocks = [list(block.parameters()) for block in stage.own_blocks]
    in_blocks = {id(one) for block in blocks for one in block}
    return [*blocks, [one for one in stage.parameters() if id(one) not in in_blocks]]
