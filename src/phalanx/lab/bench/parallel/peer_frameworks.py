"""Frameworks beside the engine's data parallel ranks, each used as its own documentation says.

One that is not installed, or cannot run here, ends its arm with the reason.
"""

import contextlib
import os
import socket
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from phalanx.errors import TrainingError
from phalanx.lab.bench.measure.plain import adamw_options, decay_groups, load_peer_model
from phalanx.lab.bench.parallel.peers import (
    NO_CLIPPING,
    ModelCopies,
    RankSetup,
    blocks_of,
)


class AccelerateDdp(ModelCopies):
    """accelerate, which HF's Trainer runs on, over DDP."""

    def __init__(self, setting: RankSetup) -> None:
        self._accelerator = _make_accelerator(setting, None, sync_each_batch=False)
        config = setting.run.optimizer
        model = load_peer_model(setting.source)
        optimizer = torch.optim.AdamW(decay_groups(model.parameters(), config), **adamw_options(config))
        super().__init__(setting, *self._accelerator.prepare(model, optimizer))

    def microbatch_scope(self, *, is_last: bool) -> contextlib.AbstractContextManager[object]:
        """Accelerate counts microbatches itself."""
        del is_last
        scope: contextlib.AbstractContextManager[object] = self._accelerator.accumulate(self.model)
        return scope

    def backward_loss(self, loss: Tensor) -> None:
        """Accelerate divides by the number of microbatches."""
        self._accelerator.backward(loss * self.microbatches)

    def update_weights(self) -> None:
        self._accelerator.clip_grad_norm_(self.model.parameters(), self.config.clip_norm or NO_CLIPPING)
        self.optimizer.step()
        self.optimizer.zero_grad()


class AccelerateFsdp(AccelerateDdp):
    """accelerate over FSDP2; gradients are shared after every microbatch, so that no rank holds them whole.

    On CPUs accelerate takes DDP whatever plugin it is given, without a warning. Its own code for FSDP2 runs there all
    the same once its state names FSDP, and this bench measures that code.
    """

    def __init__(self, setting: RankSetup, *, reshard: bool) -> None:
        from accelerate import FullyShardedDataParallelPlugin  # noqa: PLC0415 - in the extra `benchmark`

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=reshard,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[type(blocks_of(load_peer_model(setting.source))[0]).__name__],
        )
        self._accelerator = _make_accelerator(setting, plugin, sync_each_batch=True)
        _insist_on_fsdp(self._accelerator, plugin)
        config = setting.run.optimizer
        model = load_peer_model(setting.source)
        optimizer = torch.optim.AdamW(decay_groups(model.parameters(), config), **adamw_options(config))
        sharded, optimizer = self._accelerator.prepare(model, optimizer)
        if not isinstance(sharded, FSDPModule):
            raise TrainingError(
                f"accelerate: asked for FSDP2, found {type(sharded).__name__}; this row would be another"
            )
        ModelCopies.__init__(self, setting, sharded, optimizer)
        self._reshard = reshard

    def microbatch_scope(self, *, is_last: bool) -> contextlib.AbstractContextManager[object]:
        """What stays whole does so until the last microbatch."""
        if not self._reshard:
            self.model.set_reshard_after_backward(is_last)
        return super().microbatch_scope(is_last=is_last)


class DeepSpeed(ModelCopies):
    """DeepSpeed's engine with ZeRO of a stage, over gloo."""

    def __init__(self, setting: RankSetup, *, stage: int) -> None:
        _set_rendezvous(setting)
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed  # noqa: PLC0415 - in the extra `benchmark`

        config, train = setting.run.optimizer, setting.run.train
        model = load_peer_model(setting.source)
        optimizer = torch.optim.AdamW(decay_groups(model.parameters(), config), **adamw_options(config))
        settings = {
            "train_micro_batch_size_per_gpu": train.batch_size // (train.microbatches * setting.place.world),
            "gradient_accumulation_steps": train.microbatches,
            "gradient_clipping": config.clip_norm or 0.0,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        engine, wrapped, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, dist_init_required=False
        )
        super().__init__(setting, engine, wrapped)

    def backward_loss(self, loss: Tensor) -> None:
        """DeepSpeed divides by the number of microbatches, and steps after the last one of them."""
        self.model.backward(loss * self.microbatches)
        self.model.step()

    def update_weights(self) -> None:
        """Done with the last microbatch."""


def _make_accelerator(setting: RankSetup, plugin: Any, *, sync_each_batch: bool) -> Any:
    _set_rendezvous(setting)
    from accelerate import Accelerator  # noqa: PLC0415 - in the extra `benchmark`
    from accelerate.utils import GradientAccumulationPlugin  # noqa: PLC0415

    counting = GradientAccumulationPlugin(
        num_steps=setting.run.train.microbatches, sync_each_batch=sync_each_batch, sync_with_dataloader=False
    )
    return Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_plugin=counting)


def _insist_on_fsdp(accelerator: Any, plugin: Any) -> None:
    from accelerate.utils import DistributedType  # noqa: PLC0415 - in the extra `benchmark`

    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin


def _set_rendezvous(setting: RankSetup) -> None:
    """Variables that peers read although the ranks have met already."""
    os.environ.update(setting.place.to_environment())
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    if "MASTER_PORT" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
