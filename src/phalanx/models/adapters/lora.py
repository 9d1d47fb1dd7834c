"""LoRA adapters through peft, with names and first values that do not depend on the layout of stages."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from phalanx.config.extras import import_bitsandbytes
from phalanx.errors import ModelError
from phalanx.models.config import LoraConfig
from phalanx.models.seeding import seeded_generator
from phalanx.models.stage import MAGNITUDE, StageModule


def inject_lora(stage: StageModule, adapter: LoraConfig) -> None:
    """Put adapters, on the meta device, on the linear layers of this stage's blocks; freeze the rest."""
    # which peft imports wherever it is installed
    import_bitsandbytes()
    peft = _load_peft()
    targets = adapter.targets or stage.family.facts.adapter_targets
    _check_targets(stage, targets)
    peft.inject_adapter_in_model(
        peft.LoraConfig(
            r=adapter.rank,
            lora_alpha=adapter.alpha,
            lora_dropout=adapter.dropout,
            target_modules=list(targets),
            fan_in_fan_out=stage.family.fan_in_fan_out,
            bias="none",
            use_dora=adapter.dora,
            use_rslora=adapter.rslora,
        ),
        stage,
        low_cpu_mem_usage=True,
    )


def is_lora(name: str) -> bool:
    """True for the canonical name of a low-rank adapter's matrix, or of DoRA's sizes."""
    return name.endswith((".lora_A.weight", ".lora_B.weight", MAGNITUDE))


@torch.no_grad()
def set_magnitudes(stage: StageModule) -> None:
    """Give DoRA's sizes their first values, the Euclidean norm of each output's weights: nothing is changed by them."""
    values = stage.all_parameters()
    for name, magnitude in values.items():
        if name.endswith(MAGNITUDE):
            weight = values[f"{name.removesuffix(MAGNITUDE)}.weight"]
            magnitude.copy_(torch.linalg.norm(weight, dim=0 if stage.family.fan_in_fan_out else 1))


def draw_lora(name: str, weight: Tensor, seed: int) -> None:
    """Fill one adapter matrix: A as peft does (Kaiming uniform), B with zeros.

    The values depend on the seed and the canonical name only. Nothing of ``torch.nn.init`` is used: while
    transformers loads a model in another thread, its functions do nothing.
    """
    if name.endswith(MAGNITUDE):
        # it follows from the model's weights; see `set_magnitudes`
        return
    if name.endswith(".lora_B.weight"):
        weight.detach().zero_()
        return
    generator = seeded_generator(seed, name)
    # the bound of kaiming_uniform_(a=sqrt(5)), rounding included
    gain = math.sqrt(2.0 / (1 + math.sqrt(5) ** 2))
    bound = math.sqrt(3.0) * (gain / math.sqrt(weight.shape[1]))
    values = torch.empty(weight.shape, dtype=torch.float32, device="cpu").uniform_(-bound, bound, generator=generator)
    weight.detach().copy_(values)


def _load_peft() -> Any:
    try:
        import peft  # noqa: PLC0415 - seconds to import, and needed only when adapters are asked for
    except ImportError as exc:
        raise ModelError("model.adapter: needs peft, which is not installed; install phalanx-train[lora]") from exc
    return peft


def _check_targets(stage: StageModule, targets: tuple[str, ...]) -> None:
    block = stage.own_blocks[0]
    linear = [name for name, module in block.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            raise ModelError(
                f"model.adapter.targets: found {target!r}; the linear layers of {stage.family.model_type} "
                f"are {', '.join(linear)}"
            )
