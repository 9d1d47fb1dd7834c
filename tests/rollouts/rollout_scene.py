"""A small policy with sharp opinions."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from phalanx.rollouts import RolloutPolicy

VOCAB_SIZE = 256
END = 5


def policy_of_seed(seed: int) -> RolloutPolicy:
    """Random weights, larger than usual, so that logits are not all alike."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=96,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return RolloutPolicy.of(model)
