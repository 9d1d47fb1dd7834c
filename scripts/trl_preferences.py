"""TRL's preference losses on one batch each: rows, loss and every gradient as JSON.

Runs in an environment of its own: ``pip install torch==2.13.0 trl==1.16.0``, then
``python scripts/trl_preferences.py > benchmarks/results/trl-preferences.json``. The test that compares is
``tests/objectives/test_trl_preference_parity.py``.
"""

import json
import os
import sys
import tempfile

os.environ.update(
    HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", CUDA_VISIBLE_DEVICES="", TRL_EXPERIMENTAL_SILENCE="1"
)

import torch
import trl
from datasets import Dataset
from provenance import provenance
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

MARKS = ["<|endoftext|>", "<|pad|>"]
ARCHITECTURE = {
    "vocab_size": 258,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 257,
}
PAIRS = [
    {"prompt": "2+2?", "chosen": " It is four.", "rejected": " no"},
    {"prompt": "a colour", "chosen": " red", "rejected": " I will not say."},
    {"prompt": "hi", "chosen": " hello you", "rejected": " go"},
    {"prompt": "who?", "chosen": " me", "rejected": " you, of course"},
]
EVEN_PAIRS = [
    {"prompt": "?", "chosen": " four", "rejected": " no"},
    {"prompt": "a", "chosen": " reds", "rejected": " I will not say."},
    {"prompt": "h", "chosen": " hell", "rejected": " go"},
]
"""Pairs of which TRL's mean over a batch's tokens, for ORPO with those of prompts, is one over each chosen answer:
prompts are one token, and chosen answers are equally long."""
MARGINS = [0.5, 0.0, 1.5, 0.25]
LABELS = [True, False, False, True]


def tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes, the end of text, and padding."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={one: number for number, one in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(MARKS)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=MARKS[0], pad_token=MARKS[1])


def seeded(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Give every parameter numbers that its name and a seed decide."""
    for number, (_, parameter) in enumerate(sorted(model.named_parameters())):
        draw = torch.Generator().manual_seed(seed + number)
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=draw)
    return model


def policy() -> torch.nn.Module:
    """The model that learns."""
    return seeded(LlamaForCausalLM(LlamaConfig(**ARCHITECTURE)), 1000)


def reference() -> torch.nn.Module:
    """The model that it is compared with: near, and another one."""
    model = policy()
    for number, (_, parameter) in enumerate(sorted(model.named_parameters())):
        draw = torch.Generator().manual_seed(5000 + number)
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=draw)
    return model


def shared(folder: str) -> dict[str, object]:
    """What all trainers are told."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": len(PAIRS),
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": 3,
    }


def judged(trainer: trl.DPOTrainer, rows: int = len(PAIRS)) -> dict[str, object]:
    """Loss and gradients of one trainer on its whole batch."""
    batch = trainer.data_collator([trainer.train_dataset[number] for number in range(rows)])
    trainer.model.eval()
    loss = trainer.compute_loss(trainer.model, dict(batch))
    loss.backward()
    return {
        "batch": {name: one.tolist() for name, one in batch.items() if isinstance(one, torch.Tensor)},
        "loss": float(loss.detach()),
        "gradients": {name: value.grad.tolist() for name, value in sorted(trainer.model.named_parameters())},
    }


def main() -> None:
    """Write every batch with its loss and its gradients."""
    found: dict[str, object] = {}
    words = tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        told = shared(folder)
        for kind, loss in (("dpo", "sigmoid"), ("ipo", "ipo")):
            args = trl.DPOConfig(**told, loss_type=[loss], beta=0.1, max_length=64)
            data = Dataset.from_list(PAIRS)
            found[kind] = judged(
                trl.DPOTrainer(policy(), reference(), args, train_dataset=data, processing_class=words)
            )
        singles = [
            {"prompt": one["prompt"], "completion": one["chosen"], "label": label}
            for one, label in zip(PAIRS, LABELS, strict=True)
        ]
        args = trl.KTOConfig(**told, beta=0.1, max_length=64)
        data = Dataset.from_list(singles)
        found["kto"] = judged(trl.KTOTrainer(policy(), reference(), args, train_dataset=data, processing_class=words))
        scorer = seeded(LlamaForSequenceClassification(LlamaConfig(**ARCHITECTURE, num_labels=1)), 1000)
        args = trl.RewardConfig(**told, max_length=64)
        data = Dataset.from_list([{**one, "margin": gap} for one, gap in zip(PAIRS, MARGINS, strict=True)])
        found["reward"] = judged(trl.RewardTrainer(scorer, args, train_dataset=data, processing_class=words))
        args = CPOConfig(**told, loss_type="simpo", beta=2.0, simpo_gamma=1.0, cpo_alpha=0.0, max_length=64)
        data = Dataset.from_list(PAIRS)
        found["simpo"] = judged(CPOTrainer(policy(), args, train_dataset=data, processing_class=words))
        for kind, trainer, args in (
            ("cpo", CPOTrainer, CPOConfig(**told, loss_type="sigmoid", beta=0.1, cpo_alpha=1.0, max_length=64)),
            ("orpo", ORPOTrainer, ORPOConfig(**told, beta=0.1, max_length=64)),
        ):
            data = Dataset.from_list(EVEN_PAIRS)
            one = trainer(policy(), args, train_dataset=data, processing_class=words)
            found[kind] = judged(one, len(EVEN_PAIRS))
    versions = {"torch": torch.__version__, "trl": trl.__version__}
    told = provenance("trl_preferences.py", "trl-preferences")
    json.dump({**told, "versions": versions, "architecture": ARCHITECTURE, "kinds": found}, sys.stdout)


if __name__ == "__main__":
    main()
