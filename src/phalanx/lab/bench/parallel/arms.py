"""Ways to train one model on the same batches: the engine, one plain process, and its peers."""

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from phalanx.data import Batch
from phalanx.lab.bench.measure.plain import PlainTrainer, adamw_options, decay_groups, load_peer_model
from phalanx.lab.bench.parallel.peer_frameworks import AccelerateDdp, AccelerateFsdp, DeepSpeed
from phalanx.lab.bench.parallel.peers import (
    NO_CLIPPING,
    RankSetup,
    TorchDdp,
    TorchFsdp,
    TorchZero1,
)
from phalanx.objectives import IGNORE, causal_lm_loss
from phalanx.optimizers import learning_rate
from phalanx.parallel.groups.mesh import open_domain
from phalanx.parallel.groups.rendezvous import own_device
from phalanx.train import step_inputs
from phalanx.train.engines.domain_deepspeed import open_member
from phalanx.train.sessions.domain import recipe_of


class TorchPipeline:
    """torch's pipelining, its 1F1B schedule, over two hand-cut halves of a GPT-2."""

    def __init__(self, setting: RankSetup) -> None:
        run, place = setting.run, setting.place
        self._config, self._total_steps, self._rank = run.optimizer, run.train.steps, place.rank
        self._half = _HalfModel(load_peer_model(setting.source), place.rank, place.world)
        groups = decay_groups(self._half.parameters(), run.optimizer)
        self._optimizer = torch.optim.AdamW(groups, **adamw_options(run.optimizer))
        rows, tokens = run.train.batch_size // run.train.microbatches, run.data.sequence_length
        ids, hidden = torch.zeros((rows, tokens), dtype=torch.int64), torch.empty((rows, tokens, self._half.width))
        logits = torch.empty((rows, tokens, self._half.columns), requires_grad=True)
        is_last = place.rank == place.world - 1
        stage = PipelineStage(
            self._half,
            place.rank,
            place.world,
            torch.device("cpu"),
            input_args=hidden.requires_grad_() if place.rank else ids,
            output_args=logits if is_last else torch.empty_like(hidden, requires_grad=True),
        )
        self._targets = 1
        self._schedule = pipelining.Schedule1F1B(stage, run.train.microbatches, self._mean_loss, scale_grads=False)
        self._is_last = is_last

    def step_batch(self, step: int, batch: Batch) -> float:
        """Make one step; see `phalanx.lab.bench.parallel.arms.RankArm`."""
        self._targets = int((batch.labels != IGNORE).sum())
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._config, step, self._total_steps)
        losses: list[Tensor] = []
        inputs = () if self._rank else (batch.input_ids,)
        self._schedule.step(
            *inputs, target=batch.labels if self._is_last else None, losses=losses, return_outputs=False
        )
        # both ends have the tied embedding
        dist.all_reduce(self._half.tied.grad)
        self._clip_gradients()
        self._optimizer.step()
        self._optimizer.zero_grad()
        total = torch.stack(losses).sum().detach() if losses else torch.zeros(())
        dist.all_reduce(total)
        return float(total)

    def take_phases(self) -> dict[str, float]:
        """Nothing is timed."""
        return {}

    def _mean_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return causal_lm_loss(logits, labels)[0] / self._targets

    def _clip_gradients(self) -> None:
        gradients = [p.grad for p in self._half.parameters() if p.grad is not None]
        counted = [g for g in gradients if self._rank == 0 or g is not self._half.tied.grad]
        square = torch.stack([g.square().sum() for g in counted]).sum()
        dist.all_reduce(square)
        limit = self._config.clip_norm or NO_CLIPPING
        torch._foreach_mul_(gradients, min(1.0, limit / (float(square.sqrt()) + 1e-6)))


class _HalfModel(nn.Module):
    """One of two stages of a GPT-2; the head is the second stage's own copy of the embedding."""

    def __init__(self, model: Any, rank: int, world: int) -> None:
        super().__init__()
        trunk, count = model.transformer, len(model.transformer.h)
        first, stop = rank * count // world, (rank + 1) * count // world
        self.width, self.columns = int(model.config.n_embd), int(model.config.vocab_size)
        self.blocks = nn.ModuleList(trunk.h[first:stop])
        self.words = trunk.wte if rank == 0 else None
        self.places = trunk.wpe if rank == 0 else None
        self.norm = trunk.ln_f if rank == world - 1 else None
        self.head = model.lm_head if rank == world - 1 else None
        self.tied: nn.Parameter = trunk.wte.weight

    def forward(self, x: Tensor) -> Tensor:
        """From ids or hidden states to hidden states or logits."""
        if self.words is not None and self.places is not None:
            x = self.words(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            out = block(x)
            x = out[0] if isinstance(out, tuple) else out
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


__all__ = ["ARMS", "PEERS", "RankArm", "RankSetup"]


class RankArm(Protocol):
    """One rank's way to make a step."""

    def step_batch(self, step: int, batch: Batch) -> float:
        """Make one optimizer step on a whole batch, which all ranks are given; return its mean loss in nats."""

    def take_phases(self) -> dict[str, float]:
        """Wall seconds by phase since the last call; empty where they are not known."""


class EngineArm:
    """A rank of engine `parallel`, as its run file has it: by torch's own means, or with DeepSpeed's ZeRO."""

    def __init__(self, setting: RankSetup) -> None:
        recipe = recipe_of(setting.run, setting.run.parallel, setting.source)
        domain = open_domain(recipe.parallel, own_device("cpu", setting.place))
        # until the rank's process ends
        self._open = contextlib.ExitStack()
        self._member = self._open.enter_context(open_member(setting.run, recipe, setting.source, domain, setting.place))

    def step_batch(self, step: int, batch: Batch) -> float:
        """Make one step."""
        return self._member.train_step(step, batch.input_ids, batch.labels).loss

    def take_phases(self) -> dict[str, float]:
        """Seconds by phase."""
        return self._member.timer.take_wall()


class AloneArm:
    """The un-sliced transformers model in one process, with torch's own optimizer."""

    def __init__(self, setting: RankSetup) -> None:
        self._microbatches = setting.run.train.microbatches
        self._trainer = PlainTrainer(setting.source, setting.run.optimizer, setting.run.train.steps)

    def step_batch(self, step: int, batch: Batch) -> float:
        """Make one step."""
        return self._trainer.train_step(step, step_inputs(batch, self._microbatches))

    def take_phases(self) -> dict[str, float]:
        """Nothing is timed."""
        return {}


ENGINE, ALONE = "phalanx", "plain torch, one process"
PEERS: dict[str, Callable[[RankSetup], RankArm]] = {
    "torch DDP": TorchDdp,
    "torch DDP + ZeroRedundancyOptimizer": TorchZero1,
    "torch FSDP2, parameters kept whole": lambda setting: TorchFsdp(setting, reshard=False),
    "torch FSDP2": lambda setting: TorchFsdp(setting, reshard=True),
    "torch pipelining, 1F1B": TorchPipeline,
    "accelerate DDP": AccelerateDdp,
    "accelerate FSDP2, parameters kept whole": lambda setting: AccelerateFsdp(setting, reshard=False),
    "accelerate FSDP2": lambda setting: AccelerateFsdp(setting, reshard=True),
    "DeepSpeed ZeRO 1": lambda setting: DeepSpeed(setting, stage=1),
    "DeepSpeed ZeRO 2": lambda setting: DeepSpeed(setting, stage=2),
    "DeepSpeed ZeRO 3": lambda setting: DeepSpeed(setting, stage=3),
}
ARMS: dict[str, Callable[[RankSetup], RankArm]] = {ENGINE: EngineArm, ALONE: AloneArm, **PEERS}
