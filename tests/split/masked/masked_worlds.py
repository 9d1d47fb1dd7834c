"""Small models with adapters, desks for them, and workers that are not what they should be."""

import math
from pathlib import Path

import numpy as np
import torch

from phalanx.models import LoraConfig, ModelConfig, StageSpec, build_stage, open_model
from phalanx.security.mask import MaskedMessage
from phalanx.split.masked import MaskedConfig, MaskingClient, SimulatedWorker, process_pads

VOCAB, LAYERS, SEQ = 61, 2, 12
LORA = LoraConfig()
SMALL = {"vocab_size": VOCAB, "tie_word_embeddings": True}
ARCHITECTURES = {
    "gpt2": SMALL
    | {"model_type": "gpt2", "n_layer": LAYERS, "n_embd": 32, "n_head": 4, "n_positions": 24}
    | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": SMALL
    | {"model_type": "opt", "num_hidden_layers": LAYERS, "hidden_size": 32, "ffn_dim": 48, "num_attention_heads": 4}
    | {"max_position_embeddings": 24, "dropout": 0.0, "attention_dropout": 0.0},
    "bloom": SMALL
    | {"model_type": "bloom", "n_layer": LAYERS, "hidden_size": 32, "n_head": 4}
    | {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "llama": SMALL
    | {"model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": 32, "intermediate_size": 48}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 24, "attention_dropout": 0.0},
}
LINEARS = {
    "gpt2": ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    "opt": ("self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj", "self_attn.out_proj", "fc1", "fc2"),
    "bloom": (
        "self_attention.query_key_value",
        "self_attention.dense",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
    ),
    "llama": (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ),
}
BLOCKS = {"gpt2": "transformer.h", "opt": "model.decoder.layers", "bloom": "transformer.h", "llama": "model.layers"}


def a_model(cache: Path, family: str = "gpt2", *, recompute: bool = False, adapter: LoraConfig | None = LORA):
    """The whole model as one stage, always with the same weights; its adapters are no longer fresh."""
    source = open_model(ModelConfig(from_scratch=True, architecture=ARCHITECTURES[family]), cache, seed=3)
    stage = build_stage(
        source,
        StageSpec(0, 1, 0, LAYERS),
        adapter=adapter,
        activation_checkpointing=recompute,
        attention="sdpa",
        seed=5,
    )
    generator = torch.Generator().manual_seed(8)
    for name, value in stage.trainable_parameters().items():
        if "lora_B" in name:
            value.detach().normal_(0.0, 0.05, generator=generator)
    return stage


def a_desk(worker=None, pads=None, second=None, **config):
    config = {"rows": 64, "second_worker": second is not None} | config
    return MaskingClient(worker or SimulatedWorker(), pads or process_pads("run-1"), MaskedConfig(**config), second)


def some_ids(batch: int = 3, seed: int = 11):
    return torch.randint(0, VOCAB, (batch, SEQ), generator=torch.Generator().manual_seed(seed))


def lm_loss(logits, ids):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def relative(found, exact):
    """Euclidean distance as a share of the exact value's length."""
    found, exact = found.detach().double(), exact.detach().double()
    return float((found - exact).norm() / exact.norm())


class Spy(SimulatedWorker):
    """An honest worker that writes down everything that it sees and answers."""

    def __init__(self, name: str = "spy"):
        super().__init__(name)
        self.seen: list[MaskedMessage] = []
        self.answered: list[MaskedMessage] = []
        self.loaded = {}

    def load_matrix(self, product, values):
        self.loaded[product] = values
        super().load_matrix(product, values)

    def multiply_masked(self, requests):
        answers = super().multiply_masked(requests)
        self.seen += requests
        self.answered += answers
        return answers

    def requests(self, layer, direction="forward"):
        return [one for one in self.seen if (one.product.layer, one.product.direction) == (layer, direction)]


class Liar(SimulatedWorker):
    """Changes its answers as told: `bend` gets each one with values of its own."""

    def __init__(self, bend, name: str = "liar"):
        super().__init__(name)
        self._bend = bend

    def multiply_masked(self, requests):
        answers = super().multiply_masked(requests)
        return [MaskedMessage(one.product, one.number, self._bend(one.product, one.values.copy())) for one in answers]


def chi_square(values, limit, bins=256):
    """How many standard deviations the chi-square statistic of values below `limit` is above its mean."""
    counts = np.bincount((values.ravel().astype(np.uint64) * bins // limit).astype(np.int64), minlength=bins)
    expected = values.size / bins
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - (bins - 1)) / math.sqrt(2 * (bins - 1))
