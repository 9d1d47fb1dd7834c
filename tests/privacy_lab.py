"""A tiny public model, text of the host's own and text that it must not see, and what chance is worth."""

import math

import torch

from phalanx.models import ModelConfig, open_model

VOCAB, SEQ = 256, 12
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
}
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 4,
    "n_embd": 48,
    "n_head": 4,
    "vocab_size": VOCAB,
    "n_positions": 32,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


def tiny_model(cache, architecture=None):
    """A model of random weights; every layer moves its input by about as much as the embedding is long."""
    config = ModelConfig(from_scratch=True, architecture={**(architecture or LLAMA), "initializer_range": 0.1})
    return open_model(config, cache, seed=3)


def text(rows, seed, seq=SEQ):
    """Tokens that are as unevenly frequent as words are."""
    weights = 1.0 / (torch.arange(VOCAB) + 3.0)
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(weights, rows * seq, replacement=True, generator=generator).reshape(rows, seq)


def at_most(chance, tries):
    """What guessing reaches, and four standard errors more."""
    return chance + 4 * math.sqrt(chance * (1 - chance) / tries)
