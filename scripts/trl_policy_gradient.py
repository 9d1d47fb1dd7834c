"""TRL's GRPO, Dr. GRPO and RLOO on one batch: what it sampled, and its advantages, losses and gradients as JSON.

Runs in an environment of its own: ``pip install torch==2.13.0 trl==1.16.0``, then
``python scripts/trl_policy_gradient.py > benchmarks/results/trl-policy-gradient.json``. The test that compares is
``tests/objectives/test_trl_parity.py``.
"""

import json
import os
import sys
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", CUDA_VISIBLE_DEVICES="")

import torch
import trl
from datasets import Dataset
from provenance import provenance
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB, GROUP, LONGEST = 24, 4, 6
ARCHITECTURE = {
    "vocab_size": VOCAB,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
CASES = {
    "grpo": {"loss_type": "grpo", "beta": 0.04, "temperature": 0.9, "scale_rewards": "group"},
    "dr_grpo": {"loss_type": "dr_grpo", "beta": 0.0, "temperature": 1.0, "scale_rewards": "none"},
    "rloo": {"beta": 0.05, "temperature": 1.0},
}


def seeded(model: torch.nn.Module, seed: int, spread: float) -> None:
    """Move every parameter by numbers that its name and a seed decide."""
    for number, (_, parameter) in enumerate(sorted(model.named_parameters())):
        draw = torch.Generator().manual_seed(seed * 1000 + number)
        parameter.data += spread * torch.randn(parameter.shape, generator=draw)


def vocabulary() -> PreTrainedTokenizerFast:
    """Words ``w0`` .. that are one token each."""
    words = {f"w{number}": number for number in range(VOCAB)}
    backend = Tokenizer(models.WordLevel(words, "w2"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"eos_token": "w1", "pad_token": "w0"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **special)


def reward(completion_ids, **_):
    """Made up, different within a group, and not only 0 and 1."""
    return [sum(ids) % 7 / 3.0 + len(ids) / 10 for ids in completion_ids]


def run(case: str, options: dict, folder: str) -> dict:
    """One batch of one trainer."""
    kind = "RLOO" if case == "rloo" else "GRPO"
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**ARCHITECTURE))
    for parameter in model.parameters():
        parameter.data.zero_()
    seeded(model, 1, 0.5)
    model.save_pretrained(f"{folder}/{case}")
    args = getattr(trl, f"{kind}Config")(
        output_dir=f"{folder}/out-{case}",
        per_device_train_batch_size=2 * GROUP,
        num_generations=GROUP,
        max_completion_length=LONGEST,
        num_iterations=2,
        epsilon=0.2,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_dropout=True,
        seed=3,
        **options,
    )
    prompts = [{"prompt": "w5 w9 w4"}, {"prompt": "w7"}]
    trainer = getattr(trl, f"{kind}Trainer")(
        model=f"{folder}/{case}",
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_list(prompts),
        processing_class=vocabulary(),
    )
    rewards = []
    original = trainer._calculate_rewards
    trainer._calculate_rewards = lambda *given: rewards.append(original(*given)) or rewards[-1]
    if trainer.ref_model is not None:
        seeded(trainer.ref_model, 3, 0.05)
    trainer.model.train()
    torch.manual_seed(5)
    batch = trainer._generate_and_score_completions([row for row in prompts for _ in range(GROUP)])
    # the policy has moved since it sampled, by as much as makes some ratios leave the clip
    seeded(trainer.model, 2, 0.05)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    tensors = {name: value.tolist() for name, value in batch.items() if isinstance(value, torch.Tensor)}
    return {
        "options": options,
        "rewards": rewards[0].squeeze(1).tolist(),
        "batch": tensors,
        "loss": float(loss.detach()),
        "gradients": {name: parameter.grad.tolist() for name, parameter in sorted(trainer.model.named_parameters())},
    }


def main() -> None:
    """Write all cases."""
    with tempfile.TemporaryDirectory() as folder:
        cases = {name: run(name, options, folder) for name, options in CASES.items()}
    versions = {"torch": torch.__version__, "trl": trl.__version__}
    told = provenance("trl_policy_gradient.py", "trl-policy-gradient")
    told |= {"versions": versions, "architecture": ARCHITECTURE, "cases": cases}
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main()
