"""One rank with a share that DeepSpeed keeps: the same calls as any other rank of a domain, the same numbers."""

import contextlib
import importlib
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from phalanx.engine import NO_EXTRAS, NO_LIMITS, StepLimits
from phalanx.errors import ConfigError, FailedBatchError
from phalanx.models import ModelSource, StageSpec, build_stage, estimate_costs, partition_layers
from phalanx.objectives import IGNORE, OBJECTIVES, Objective, causal_lm_loss, kind_of
from phalanx.optimizers import learning_rate, moment_names
from phalanx.parallel.control.rank_trainer import AppliedStep, RankRecipe, seed_dropout
from phalanx.parallel.data.state_dict import WEIGHT, parameter_catalogue
from phalanx.parallel.deepspeed.config import ALL_IS_SHARED, DeepSpeedConfig
from phalanx.parallel.deepspeed.disk import own_folder
from phalanx.parallel.deepspeed.extra import NAME, deepspeed_environment, drop_process_groups, load_package
from phalanx.parallel.deepspeed.settings import deepspeed_settings
from phalanx.parallel.deepspeed.state import ZeroState
from phalanx.parallel.groups.mesh import Domain
from phalanx.parallel.groups.rank_env import RankEnv
from phalanx.parallel.model.part import StagePart
from phalanx.telemetry import PhaseTimer

_SHARD_BYTES = 4 * 2**30
_STATE_BYTES = 12
_NARROW = {"fp32": None, "bf16": torch.bfloat16}


@contextlib.contextmanager
def opened_member(
    config: DeepSpeedConfig, recipe: RankRecipe, source: ModelSource, domain: Domain, place: RankEnv, digest: str
) -> Iterator["DeepSpeedMember"]:
    """Be a rank of DeepSpeed's while the context lasts; its folder on disk is gone afterwards.

    Args:
        recipe: The same on every rank.
        source: Source of the model, which every rank reads whole before it drops the other ranks' shares.
        domain: This rank's place among the copies.
        digest: Digest of the run's config, in hex.
    """
    with contextlib.ExitStack() as stack:
        folder = None
        if config.directory is not None:
            folder = stack.enter_context(own_folder(Path(config.directory), digest, place.rank))
        stack.enter_context(deepspeed_environment(domain.device.type, place.local_rank))
        stack.enter_context(warnings.catch_warnings())
        # of its own modules, and of functions of torch's that have a new name
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        member = DeepSpeedMember(config, recipe, source, domain, folder)
        stack.callback(member.close)
        yield member


class DeepSpeedMember:
    """One rank's share of the model and the optimizer, in DeepSpeed's hands.

    Args:
        recipe: The same on every rank.
        folder: Folder of this rank alone; None where the disk is not used.
    """

    def __init__(
        self, config: DeepSpeedConfig, recipe: RankRecipe, source: ModelSource, domain: Domain, folder: Path | None
    ) -> None:
        if recipe.objective != "causal_lm":
            kind = kind_of(recipe.objective)
            raise ConfigError(f"deepspeed: learns causal_lm alone, not {kind}; leave [deepspeed] out")
        self.timer = PhaseTimer()
        self._recipe = recipe
        self._domain = domain
        part = _open_part(config, recipe, source, domain)
        stages = parameter_catalogue(source, _plan_shards(source, part), recipe.adapter)
        self._names = [[name for name, _ in stage] for stage in stages]
        self._shapes = {name: shape for stage in stages for name, shape in stage}
        trained = part.stage.trainable_parameters()
        options = deepspeed_settings(config, recipe, max(parameter.numel() for parameter in part.parameters()), folder)
        package = load_package()
        optimizer = _make_optimizer(config, recipe, list(trained.values()))
        if config.offload_parameters != "none":
            _share_out(package, part, options, domain.device)
        self._engine, *_ = package.initialize(model=part, optimizer=optimizer, config=options, dist_init_required=False)
        self._state = ZeroState(self._engine, trained, self._shapes, shares_parameters=config.zero == ALL_IS_SHARED)

    @property
    def num_stages(self) -> int:
        """Parts in which the state is collected and loaded, so that rank 0 never has all of a large one."""
        return len(self._names)

    @property
    def objective(self) -> Objective:
        """The next token: nothing else is learned here."""
        return OBJECTIVES["causal_lm"]

    def train_step(
        self,
        step: int,
        ids: Tensor,
        labels: Tensor,
        extras: Mapping[str, Tensor] = NO_EXTRAS,
        limits: StepLimits = NO_LIMITS,
    ) -> AppliedStep:
        """Run one optimizer step on a whole batch.

        Args:
            step: Number of the step, from 0.
            ids: int64 ``[batch, seq]``, the same on every rank.
            labels: Next tokens, ``[batch, seq]``.
            extras: Always None: the objective reads no more rows.
            limits: Of no effect: run files with [deepspeed] have no `train.stability`.
        """
        self.objective.check_extras(extras, *labels.shape)
        all_targets = int((labels != IGNORE).sum())
        if not all_targets:
            raise FailedBatchError(f"step {step}: the batch has no token to predict")
        self._set_rate(learning_rate(self._recipe.optimizer, step, self._recipe.total_steps))
        seed_dropout(self._recipe, step, self._domain)
        # copies average their gradients, the step wants their sum
        loss = self._run_step(self._own_rows(ids), self._own_rows(labels), self._recipe.parallel.dp / all_targets)
        norm = float(self._engine.get_global_grad_norm())
        if not self._engine.was_step_applied():
            raise FailedBatchError(
                f"step {step}: loss {loss / all_targets}, gradient norm {norm}; lower optimizer.lr or set "
                "optimizer.clip_norm"
            )
        return AppliedStep(loss / all_targets, norm)

    @torch.no_grad()
    def evaluate_batch(
        self, ids: Tensor, labels: Tensor, extras: Mapping[str, Tensor] = NO_EXTRAS
    ) -> tuple[float, int]:
        """Summed loss and number of targets of a batch, the same on every rank; rows are a multiple of dp."""
        self.objective.check_extras(extras, *labels.shape)
        self._engine.eval()
        own_labels = self._own_rows(labels)
        loss, _ = causal_lm_loss(self._engine(self._own_rows(ids)), own_labels)
        self._engine.train()
        total = torch.tensor([float(loss), float((own_labels != IGNORE).sum())], dtype=torch.float64)
        dist.all_reduce(total)
        return float(total[0]), int(total[1])

    def collect_stage(self, stage: int) -> dict[str, Tensor]:
        """Bring one stage's whole tensors to rank 0: ``weight/...`` and moments; others get none."""
        tensors = {}
        for kind, name in self._stage_entries(stage):
            full = self._state.gather_tensor(kind, name)
            if self._domain.is_leader:
                tensors[f"{kind}/{name}"] = full
        return tensors

    def load_stage(self, num_steps: int, stage: int, tensors: dict[str, Tensor] | None) -> None:
        """Take one stage's state from rank 0, whatever layout and engine it was saved under.

        Args:
            num_steps: Steps that the optimizer has made.
            tensors: Tensors by the names of `collect_stage`; on rank 0 alone.
        """
        if not self._state.has_moments:
            # have the optimizer make its moments by a step with no gradient and no rate, which changes nothing
            self._set_rate(0.0)
            ids = torch.zeros((1, self._recipe.sequence_length), dtype=torch.int64, device=self._domain.device)
            self._engine.set_gradient_accumulation_boundary(True)
            self._engine.backward(self._engine(ids).sum() * 0.0, scale_wrt_gas=False)
            self._engine.step()
        for kind, name in self._stage_entries(stage):
            key = f"{kind}/{name}"
            full = torch.empty(self._shapes[name]) if tensors is None else tensors[key].contiguous()
            dist.broadcast(full, src=0)
            self._state.fill_tensor(kind, name, full)
        self._state.set_steps(num_steps)

    def tensor_names(self, stage: int) -> list[str]:
        """Names of the tensors of a stage, as in `collect_stage` and `load_stage`."""
        return [f"{kind}/{name}" for kind, name in self._stage_entries(stage)]

    def close(self) -> None:
        """Let go of everything; another member may be made in this process afterwards."""
        self._engine.destroy()
        drop_process_groups()

    def _stage_entries(self, stage: int) -> list[tuple[str, str]]:
        kinds = (WEIGHT, *moment_names(self._recipe.optimizer.kind))
        return [(kind, name) for kind in kinds for name in self._names[stage]]

    def _run_step(self, ids: Tensor, labels: Tensor, scale: float) -> float:
        """All microbatches of this rank and the update; summed loss of all ranks."""
        engine, count = self._engine, self._recipe.microbatches
        total = torch.zeros(1, dtype=torch.float64)
        for number, (x, y) in enumerate(zip(ids.chunk(count), labels.chunk(count), strict=True), start=1):
            is_last = number == count
            engine.set_gradient_accumulation_boundary(is_last)
            with self.timer.time_phase("compute"):
                loss, _ = causal_lm_loss(engine(x), y)
                total += float(loss.detach())
                if is_last:
                    dist.all_reduce(total)
                    # deepspeed gives up a step with a gradient that is not finite; so does one with such a loss
                    scale = scale if math.isfinite(float(total)) else math.nan
                engine.backward(loss * scale, scale_wrt_gas=False)
            with self.timer.time_phase("update"):
                engine.step()
        return float(total)

    def _set_rate(self, lr: float) -> None:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr

    def _own_rows(self, x: Tensor) -> Tensor:
        return x.chunk(self._recipe.parallel.dp)[self._domain.dp].to(self._domain.device)


def _share_out(package: Any, part: StagePart, said: dict[str, Any], device: torch.device) -> None:
    """Leave each rank its share of the parameters, one after another: the device never has all of them."""
    package.zero.Init(module=part, config_dict_or_path=said)
    for module in part.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def _open_part(config: DeepSpeedConfig, recipe: RankRecipe, source: ModelSource, domain: Domain) -> StagePart:
    stage = build_stage(
        source,
        StageSpec(0, 1, 0, source.num_layers),
        adapter=recipe.adapter,
        activation_checkpointing=False,
        attention="eager" if recipe.attention == "eager" else "sdpa",
        seed=recipe.seed,
        device=str(domain.device) if config.offload_parameters == "none" else "cpu",
    )
    return StagePart(stage, domain, narrow=_NARROW[recipe.precision])


def _plan_shards(source: ModelSource, part: StagePart) -> tuple[StageSpec, ...]:
    """Layers by parts of about 4 GiB of state."""
    size = _STATE_BYTES * sum(parameter.numel() for parameter in part.stage.trainable_parameters().values())
    embedding, head = estimate_costs(source.hub_config)
    return partition_layers(source.num_layers, min(source.num_layers, 1 + size // _SHARD_BYTES), None, embedding, head)


def _make_optimizer(
    config: DeepSpeedConfig, recipe: RankRecipe, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """AdamW: deepspeed's kernel where the update is made on the host, torch's elsewhere."""
    optimizer_config = recipe.optimizer
    groups = [
        {"params": [p for p in parameters if (p.ndim >= 2) == is_decayed], "weight_decay": decay}
        for is_decayed, decay in ((True, optimizer_config.weight_decay), (False, 0.0))
    ]
    groups = [group for group in groups if group["params"]]
    options: dict[str, Any] = {"lr": optimizer_config.lr, "betas": optimizer_config.betas, "eps": optimizer_config.eps}
    if config.offload_optimizer == "none":
        return torch.optim.AdamW(groups, fused=True, **options)
    adam = importlib.import_module(f"{NAME}.ops.adam").DeepSpeedCPUAdam
    optimizer: torch.optim.Optimizer = adam(groups, adamw_mode=True, **options)
    return optimizer
