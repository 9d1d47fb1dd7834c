"""Whole tensors out of DeepSpeed's shares, and into them, wherever they are kept.

deepspeed stores the trained numbers twice: in the layers' dtype, and in fp32 beside the moments. Both are filled here,
and the second is saved in a checkpoint. Its own checkpoints are pickles; none is written or read.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional

from phalanx.errors import TrainingError
from phalanx.parallel.data.state_dict import WEIGHT
from phalanx.parallel.deepspeed.extra import NAME

_STEP = "step"


class ZeroState:
    """The state of one rank's share; all ranks call each method together.

    Args:
        engine: Engine from ``deepspeed.initialize``.
        shares_parameters: ZeRO 3, where a layer has its parameters only while it runs.
    """

    def __init__(
        self,
        engine: Any,
        parameters: Mapping[str, nn.Parameter],
        shapes: Mapping[str, tuple[int, ...]],
        *,
        shares_parameters: bool,
    ) -> None:
        self._engine = engine
        self._parameters = parameters
        self._shapes = shapes
        self._shares_parameters = shares_parameters
        self._api: Any = importlib.import_module(f"{NAME}.utils")
        self._is_linked = shares_parameters
        self._gathered: Any = importlib.import_module(NAME).zero.GatheredParameters

    @property
    def has_moments(self) -> bool:
        """Whether a step has been made; before the first one the optimizer keeps nothing."""
        return any(_STEP in state for state in self._optimizer_state.values())

    @torch.no_grad()
    def gather_tensor(self, kind: str, name: str) -> Tensor:
        """One tensor in memory of its own, on the CPU.

        Args:
            kind: Weight, or one of the optimizer's moments.
        """
        parameter, shape = self._parameters[name], self._shapes[name]
        if kind != WEIGHT and not self.has_moments:
            return torch.zeros(shape)
        api = self._api
        if kind == WEIGHT:
            value = api.safe_get_full_fp32_param(parameter)
        else:
            self._link_moments()
            value = api.safe_get_full_optimizer_state(parameter, kind)
        if value is None:
            raise TrainingError(f"{name}: deepspeed has no {kind} of it; this is a fault of Phalanx")
        full: Tensor = value.detach().to("cpu", torch.float32, copy=True).reshape(shape)
        return full

    @torch.no_grad()
    def fill_tensor(self, kind: str, name: str, full: Tensor) -> None:
        """Take this rank's share of a whole tensor, which every rank has; moments once there are some."""
        parameter, api = self._parameters[name], self._api
        if self._shares_parameters:
            self._fill_share(kind, parameter, full)
        elif kind == WEIGHT:
            parameter.copy_(full)
            api.safe_set_full_fp32_param(parameter, full)
        else:
            self._link_moments()
            api.safe_set_full_optimizer_state(parameter, full, kind)

    def set_steps(self, num_steps: int) -> None:
        """Say how many steps the moments are of."""
        for state in self._optimizer_state.values():
            if isinstance(state.get(_STEP), Tensor):
                state[_STEP].fill_(float(num_steps))
            elif _STEP in state:
                state[_STEP] = num_steps
        self._repeat_powers(num_steps)

    def _repeat_powers(self, num_steps: int) -> None:
        """Have deepspeed's kernel on the host multiply its betas step by step, as a run that never stopped has.

        It takes their powers at once otherwise, which differ in the last bits.
        """
        optimizer = self._engine.optimizer.optimizer
        kernel = getattr(optimizer, "ds_opt_adam", None)
        if kernel is None:
            return
        group, numbers = optimizer.param_groups[0], [torch.zeros(1) for _ in range(4)]
        for step in range(1, num_steps + 1):
            kernel.adam_update(
                optimizer.opt_id, step, 0.0, *group["betas"], group["eps"], 0.0, group["bias_correction"], *numbers
            )

    @property
    def _optimizer_state(self) -> Mapping[Any, dict[str, Any]]:
        state: Mapping[Any, dict[str, Any]] = self._engine.optimizer.optimizer.state
        return state

    def _link_moments(self) -> None:
        """With ZeRO 1 and 2: have deepspeed find its moments.

        It looks for them once, in the first step, when the first group of parameters has moments and the others not.
        """
        if not self._is_linked:
            zero = self._engine.optimizer
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()
            self._is_linked = True

    def _fill_share(self, kind: str, parameter: nn.Parameter, full: Tensor) -> None:
        is_weight = kind == WEIGHT
        # a share in a file can be filled while its layer has it, and not else
        with self._gathered([parameter], modifier_rank=0 if is_weight else None):
            share = self._share_of(parameter, full)
            if is_weight:
                parameter.copy_(full)
                self._api.safe_set_local_fp32_param(parameter, share)
            else:
                self._api.safe_set_local_optimizer_state(parameter, share, kind)

    def _share_of(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        """Equal shares of the flat numbers in the order of ranks, the last filled up with zeros."""
        ranks = dist.get_world_size()
        numbers = -(-full.numel() // ranks)
        padded = functional.pad(full.reshape(-1), (0, ranks * numbers - full.numel()))
        return padded.narrow(0, dist.get_rank() * numbers, numbers).to(parameter.device)
