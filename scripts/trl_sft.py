"""TRL's supervised fine-tuning on one batch of conversations: ids, labels, loss and every gradient as JSON.

Runs in an environment of its own: ``pip install torch==2.13.0 trl==1.16.0``, then
``python scripts/trl_sft.py > benchmarks/results/trl-sft.json``. The test that compares is
``tests/objectives/test_trl_sft_parity.py``.
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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ARCHITECTURE = {
    "vocab_size": 259,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 256,
}
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONVERSATIONS = [
    [("system", "Be brief."), ("user", "hi é"), ("assistant", "yo"), ("user", "more"), ("assistant", "no more 😀")],
    [("user", "2+2?"), ("assistant", "4")],
    [("user", "Name a colour."), ("assistant", "  Red,\n or blue. ")],
    [("user", "x"), ("assistant", "y"), ("assistant", "z")],
]


def tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes, the end of text, and the two marks of ChatML."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={one: number for number, one in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(MARKS)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=MARKS[0], pad_token=MARKS[0])
    made.chat_template = TEMPLATE
    return made


def seeded(model: torch.nn.Module) -> None:
    """Give every parameter numbers that its name decides."""
    for number, (_, parameter) in enumerate(sorted(model.named_parameters())):
        draw = torch.Generator().manual_seed(1000 + number)
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=draw)


def main() -> None:
    """Write the batch, its loss and its gradients."""
    talks = [[{"role": role, "content": content} for role, content in one] for one in CONVERSATIONS]
    model = LlamaForCausalLM(LlamaConfig(**ARCHITECTURE))
    seeded(model)
    with tempfile.TemporaryDirectory() as folder:
        args = trl.SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=len(talks),
            assistant_only_loss=True,
            max_length=256,
            packing=False,
            shuffle_dataset=False,
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            seed=3,
        )
        trainer = trl.SFTTrainer(
            model=model,
            args=args,
            train_dataset=Dataset.from_list([{"messages": one} for one in talks]),
            processing_class=tokenizer(),
        )
        batch = trainer.data_collator([trainer.train_dataset[number] for number in range(len(talks))])
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, dict(batch))
        loss.backward()
    gradients = {name: parameter.grad.tolist() for name, parameter in sorted(trainer.model.named_parameters())}
    found = {
        **provenance("trl_sft.py", "trl-sft"),
        "versions": {"torch": torch.__version__, "trl": trl.__version__},
        "architecture": ARCHITECTURE,
        "template": TEMPLATE,
        "conversations": talks,
        "batch": {name: rows.tolist() for name, rows in batch.items() if isinstance(rows, torch.Tensor)},
        "loss": float(loss.detach()),
        "gradients": gradients,
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
