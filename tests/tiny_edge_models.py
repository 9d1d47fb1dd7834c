"""Small models of random weights, of several families, with a byte-level vocabulary and a chat template."""

from pathlib import Path

import torch
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from phalanx.data.tokenizers.config import ByteBpeTraining
from phalanx.data.tokenizers.training import train_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = ["the owner of the pipeline keeps the keys", "don't 1234 tell anyone about 3.14 naïve keys", "a  b\n\n c"] * 20


def byte_tokenizer(**settings) -> PreTrainedTokenizerFast:
    config = ByteBpeTraining(vocab_size=300, special_tokens=("<|im_start|>", "<|im_end|>"), **settings)
    backend = train_tokenizer(TEXTS, config).backend
    named = {"bos_token": config.end_of_text, "eos_token": "<|im_end|>", "pad_token": config.end_of_text}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_model(out: Path, family: str = "llama", tokenizer: PreTrainedTokenizerFast | None = None, **changed) -> Path:
    """Write a model of random weights; large enough weights that answers are no ties."""
    tokenizer = tokenizer or byte_tokenizer()
    torch.manual_seed(5)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    sizes |= {"initializer_range": 0.2, "tie_word_embeddings": False, **ends, **changed}
    if family == "gpt2":
        small = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.2}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **small, **ends))
    else:
        kinds = {
            "llama": (LlamaConfig, LlamaForCausalLM),
            "qwen2": (Qwen2Config, Qwen2ForCausalLM),
            "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        }
        config, kind = kinds[family]
        model = kind(config(**sizes))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    if family == "qwen2":
        # transformers reads any tokenizer of this family by Qwen's own rules; a real model's file has them
        AutoTokenizer.from_pretrained(out).save_pretrained(out)
    return out
