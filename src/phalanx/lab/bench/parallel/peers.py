"""Plain torch beside the engine's data parallel ranks, and the setting of every arm.

Weights, batches, microbatches, loss, clipping and schedule are the same.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from phalanx.data import Batch
from phalanx.lab.bench.measure.plain import adamw_options, decay_groups, load_peer_model
from phalanx.models import ModelSource
from phalanx.objectives import IGNORE, causal_lm_loss
from phalanx.optimizers import learning_rate
from phalanx.parallel import RankEnv
from phalanx.train import DomainRun


@dataclass(frozen=True)
class RankSetup:
    """One rank's."""

    run: DomainRun
    source: ModelSource
    place: RankEnv


NO_CLIPPING = 1e9


def blocks_of(model: Any) -> list[nn.Module]:
    """The blocks of a transformers model."""
    return list(model.transformer.h if hasattr(model, "transformer") else model.model.layers)


class ModelCopies:
    """Data parallel: each rank trains on its rows; subclasses say what wraps the model."""

    def __init__(self, setting: RankSetup, model: Any, optimizer: Any) -> None:
        self.config = setting.run.optimizer
        self.model = model
        self.optimizer = optimizer
        self.microbatches = setting.run.train.microbatches
        self._total_steps = setting.run.train.steps
        self._place = setting.place

    def step_batch(self, step: int, batch: Batch) -> float:
        """Make one step; see `phalanx.lab.bench.parallel.arms.RankArm`."""
        world = self._place.world
        ids, labels = (x.chunk(world)[self._place.rank] for x in (batch.input_ids, batch.labels))
        targets = int((batch.labels != IGNORE).sum())
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, step, self._total_steps)
        total = torch.zeros(1)
        pairs = zip(ids.chunk(self.microbatches), labels.chunk(self.microbatches), strict=True)
        for number, (x, y) in enumerate(pairs, start=1):
            with self.microbatch_scope(is_last=number == self.microbatches):
                loss = causal_lm_loss(self.model(input_ids=x, use_cache=False).logits, y)[0]
                # copies average their gradients, the step wants their sum
                self.backward_loss(loss * (world / targets))
            total += loss.detach()
        self.update_weights()
        dist.all_reduce(total)
        return float(total) / targets

    def take_phases(self) -> dict[str, float]:
        """Nothing is timed."""
        return {}

    def microbatch_scope(self, *, is_last: bool) -> contextlib.AbstractContextManager[object]:
        """Around forward and backward of one microbatch."""
        del is_last
        return contextlib.nullcontext()

    def backward_loss(self, loss: Tensor) -> None:
        """Run the backward pass."""
        torch.autograd.backward(loss)

    def update_weights(self) -> None:
        """Clip, step, and forget gradients."""
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm or NO_CLIPPING)
        self.optimizer.step()
        self.optimizer.zero_grad()


class TorchDdp(ModelCopies):
    """torch's DistributedDataParallel, synchronised at the last microbatch."""

    def __init__(self, setting: RankSetup) -> None:
        config = setting.run.optimizer
        model = DistributedDataParallel(load_peer_model(setting.source), gradient_as_bucket_view=True)
        groups = decay_groups(model.parameters(), config)
        super().__init__(setting, model, torch.optim.AdamW(groups, **adamw_options(config)))

    def microbatch_scope(self, *, is_last: bool) -> contextlib.AbstractContextManager[object]:
        """Gradients are exchanged once a step."""
        scope: contextlib.AbstractContextManager[object] = contextlib.nullcontext() if is_last else self.model.no_sync()
        return scope


class TorchZero1(TorchDdp):
    """torch's DistributedDataParallel with its ZeroRedundancyOptimizer."""

    def __init__(self, setting: RankSetup) -> None:
        super().__init__(setting)
        from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415 - its package warns when imported

        groups = decay_groups(self.model.parameters(), self.config)
        self.optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **adamw_options(self.config))


class TorchFsdp(ModelCopies):
    """torch's FSDP2 over blocks and what lies around them; gradients are shared after every microbatch."""

    def __init__(self, setting: RankSetup, *, reshard: bool) -> None:
        model, mesh = load_peer_model(setting.source), init_device_mesh("cpu", (setting.place.world,))
        for block in blocks_of(model):
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        # left to torch, which keeps what lies around the blocks from the forward to the backward pass
        fully_shard(model, mesh=mesh, reshard_after_forward=None if reshard else False)
        groups = decay_groups(model.parameters(), setting.run.optimizer)
        super().__init__(setting, model, torch.optim.AdamW(groups, **adamw_options(setting.run.optimizer)))
        self._reshard = reshard

    def microbatch_scope(self, *, is_last: bool) -> contextlib.AbstractContextManager[object]:
        """What stays whole does so until the last microbatch."""
        if not self._reshard:
            self.model.set_reshard_after_backward(is_last)
        return contextlib.nullcontext()
