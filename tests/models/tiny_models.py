"""Tiny hub configs of every family and variant, and whole models to compare with."""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

from phalanx.models import (
    FAMILIES,
    LoraConfig,
    ModelConfig,
    ModelSource,
    StageModule,
    StageSpec,
    build_stage,
    open_model,
    partition_layers,
    tie_head,
)
from phalanx.models.master_weights import keep_masters

LAYERS = 4
VOCAB = 61

Precision = Literal["fp32", "bf16", "bf16_weights"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "bf16_weights")
"""Of a run: bf16 is autocast; with bf16 weights whole models are transformers' in bf16, and stages keep masters."""

_GPT2 = {
    "model_type": "gpt2",
    "n_layer": 4,
    "n_embd": 32,
    "n_head": 4,
    "vocab_size": VOCAB,
    "n_positions": 24,
}
_OPT = {
    "model_type": "opt",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 24,
}
_BLOOM = {"model_type": "bloom", "n_layer": 4, "hidden_size": 32, "n_head": 4, "vocab_size": VOCAB}
_LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 24,
}

_FALCON = {
    "model_type": "falcon",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 24,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": _GPT2,
    "gpt2-untied": _GPT2 | {"tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True},
    "opt": _OPT,
    "opt-post-norm": _OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 16},
    "opt-untied": _OPT | {"tie_word_embeddings": False, "word_embed_proj_dim": 16},
    "bloom": _BLOOM,
    "bloom-untied": _BLOOM | {"tie_word_embeddings": False, "n_head": 2},
    "bloom-odd-heads": _BLOOM | {"n_head": 6, "hidden_size": 36, "apply_residual_connection_post_layernorm": True},
    # parallel halves and one head of keys and values: PaLM's block
    "falcon": _FALCON,
    "falcon-untied": _FALCON | {"tie_word_embeddings": False, "bias": True, "ffn_hidden_size": 48},
    "falcon-two-norms": _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon-serial": _FALCON | {"parallel_attn": False, "multi_query": False},
    "llama": _LLAMA,
    "llama-tied": _LLAMA | {"tie_word_embeddings": True, "rope_theta": 100000.0, "attention_bias": True},
}
DROPOUT: dict[str, dict[str, Any]] = {
    "gpt2": {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2},
    "opt": {"dropout": 0.2, "attention_dropout": 0.2},
    "bloom": {"hidden_dropout": 0.2, "attention_dropout": 0.2},
    "llama": {"attention_dropout": 0.2},
    "falcon": {"hidden_dropout": 0.2, "attention_dropout": 0.2},
}


def without_dropout(architecture: dict[str, Any]) -> dict[str, Any]:
    return architecture | dict.fromkeys(DROPOUT[architecture["model_type"]], 0.0)


def tiny_source(name: str, cache: Path, **changes: Any) -> ModelSource:
    architecture = without_dropout(ARCHITECTURES[name]) | changes
    return open_model(ModelConfig(from_scratch=True, architecture=architecture), cache, seed=3)


def whole_model(source: ModelSource, attention: str = "sdpa", precision: Precision = "fp32") -> Any:
    kernel = FAMILIES[source.hub_config.model_type].choose_kernel(attention)
    model = AutoModelForCausalLM.from_pretrained(
        source.directory, attn_implementation=kernel, dtype=dtype_of(precision), local_files_only=True
    )
    return with_own_memory(model).train()


def with_own_memory(model: Any) -> Any:
    """Move parameters out of the file that they are mapped from: at an odd address products of them round otherwise."""
    for value in model.parameters():
        value.data = value.data.clone()
    return model


def dtype_of(precision: Precision) -> torch.dtype:
    """Of a whole model's weights."""
    return torch.bfloat16 if precision == "bf16_weights" else torch.float32


def autocast_of(precision: Precision) -> torch.autocast:
    """Where a forward pass of a precision runs."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16")


def in_precision(stages: list[StageModule], precision: Precision) -> list[StageModule]:
    """The same stages as a run of a precision has them."""
    # the first one last, for it has the embedding that a tied head is
    for stage in reversed(stages) if precision == "bf16_weights" else ():
        keep_masters(stage)
    return stages


def gradients_of(stages: Sequence[StageModule]) -> dict[str, torch.Tensor]:
    """Of a backward pass, by the names of weights."""
    own = {name: p for stage in stages for name, p in (stage.computing or stage.all_parameters()).items()}
    return {name: p.grad for name, p in own.items() if p.grad is not None}


@lru_cache(maxsize=len(PRECISIONS))
def _whole_pass(directory: Path, precision: Precision) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Transformers' whole model with its gradients, its logits and its loss, once for all numbers of stages."""
    model, ids = whole_model(ModelSource(directory), precision=precision), some_ids()
    with autocast_of(precision):
        expected = model(input_ids=ids, labels=ids, use_cache=False)
    expected.loss.backward()
    return model, expected.logits.detach(), expected.loss.detach()


def assert_causal_is_whole(source: ModelSource, num_stages: int, precision: Precision = "fp32") -> None:
    """Logits, loss and all gradients of a decoder's stages have the bits of transformers' whole model."""
    model, whole_logits, whole_loss = _whole_pass(source.directory, precision)
    ids, stages = some_ids(), in_precision(build_all(source, num_stages), precision)

    with autocast_of(precision):
        logits = chain(stages, ids)
        loss = model.loss_function(logits, ids, vocab_size=VOCAB)
    loss.backward()

    # what leaves a stage with bf16 weights is wide, and has their bits
    assert torch.equal(logits, whole_logits.to(logits.dtype))
    assert torch.equal(loss, whole_loss)
    sliced, whole = gradients_of(stages), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert sliced.keys() == whole.keys()
    for name, gradient in whole.items():
        assert torch.equal(sliced[name], gradient), name


def build_all(
    source: ModelSource,
    num_stages: int,
    *,
    adapter: LoraConfig | None = None,
    attention: str = "sdpa",
    recompute: bool = False,
    seed: int = 5,
) -> list[StageModule]:
    specs = partition_layers(source.num_layers, num_stages, None, 0.0, 0.0)
    stages = [
        build_stage(source, spec, adapter=adapter, activation_checkpointing=recompute, attention=attention, seed=seed)
        for spec in specs
    ]
    tie_head(stages[0], stages[-1])
    return stages


def chain(stages: list[StageModule], ids: torch.Tensor) -> torch.Tensor:
    x = ids
    for stage in stages:
        x = stage(x)
    return x


def named(stages: list[StageModule]) -> dict[str, torch.nn.Parameter]:
    merged: dict[str, torch.nn.Parameter] = {}
    for stage in stages:
        own = stage.all_parameters()
        assert not merged.keys() & own.keys()
        merged |= own
    return merged


def trained(stages: list[StageModule]) -> dict[str, torch.nn.Parameter]:
    return {name: value for stage in stages for name, value in stage.trainable_parameters().items()}


def disturbed(stages: list[StageModule], size: float) -> list[StageModule]:
    """The same stages as if after some training: numbers of this size are added to all that is trained."""
    generator = torch.Generator().manual_seed(4)
    for value in trained(stages).values():
        value.detach().normal_(0.0, size, generator=generator)
    return stages


class Held:
    """A checkpoint that was verified, of what is trained."""

    def __init__(self, stages: list[StageModule]) -> None:
        self._tensors = {f"weight/{key}": value.detach() for key, value in trained(stages).items()}

    def stages_by_tensor(self) -> list[str]:
        return list(self._tensors)

    def check_vocabulary(self, digest: str) -> None:
        return None

    def read_tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def some_ids(batch: int = 2, seq: int = 17) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, seq), generator=torch.Generator().manual_seed(11))


def lm_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def spec_of(source: ModelSource, num_stages: int, index: int) -> StageSpec:
    return partition_layers(source.num_layers, num_stages, None, 0.0, 0.0)[index]


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
