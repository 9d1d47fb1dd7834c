"""Adapters: trained tensors beside frozen weights, their files, and quantized frozen weights."""

from torch import Tensor
from phalanx.models.adapters.lora import draw_lora, inject_lora, is_lora
from phalanx.models.adapters.prefix import draw_prefix, inject_prefix, is_prefix
from phalanx.models.adapters.prompt import draw_prompt, inject_prompt, is_prompt
from phalanx.models.adapters.spf import inject_spf, is_spf
from phalanx.models.config import AdapterConfig, LoraConfig, PrefixConfig, PromptEncoderConfig, SpfConfig
from phalanx.models.stage import StageModule


def inject_adapter(stage: StageModule, adapter: AdapterConfig) -> None:
    """Put the adapter's tensors, on the meta device, into this stage; freeze the rest."""
    match adapter:
        case LoraConfig():
            inject_lora(stage, adapter)
        case SpfConfig():
            inject_spf(stage, adapter)
        case PrefixConfig():
            inject_prefix(stage, adapter)
        case PromptEncoderConfig():
            inject_prompt(stage, adapter)


def is_adapter(name: str) -> bool:
    """True for the canonical name of an adapter's parameter."""
    return is_lora(name) or is_spf(name) or is_prefix(name) or is_prompt(name)


def draw_adapter(name: str, values: Tensor, seed: int) -> None:
    """Give an adapter's parameter its first values, which depend on the seed and the canonical name only."""
    if is_prefix(name):
        draw_prefix(name, values, seed)
    elif is_prompt(name):
        draw_prompt(name, values, seed)
    elif is_spf(name):
        values.detach().zero_()
    else:
        draw_lora(name, values, seed)
