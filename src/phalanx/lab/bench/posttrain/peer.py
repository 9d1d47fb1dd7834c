"""TRL's trainers on given rows, as a program in an environment of its own: ``PYTHON peer.py SPEC.json``.

It imports nothing of this package. The first line out is ``{"version": ...}``; then each line in is an order
``{"steps": N}``, and each line out is ``{"losses": [...]}``. The trainer's own loop makes the steps, with its
loader, clipping, optimizer and schedule; between orders the loop waits.
"""

import gc
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", CUDA_VISIBLE_DEVICES="", TQDM_DISABLE="1")

torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")
_IGNORE, _PADDING = -100, 1


class OrderedSteps(transformers.TrainerCallback):  # type: ignore[misc]
    """A callback that waits for an order whenever the steps of the last one are made.

    Args:
        orders: Further ones; None ends the training with the first.
        answers: Get the losses of each order.
    """

    def __init__(self, steps: int, orders: IO[str] | None = None, answers: IO[str] | None = None) -> None:
        self.losses: list[float] = []
        self._left, self._orders, self._answers = steps, orders, answers

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Answer after the last step of an order."""
        self._left -= 1
        if self._left:
            return
        if self._answers is not None:
            _print_posttrain(self._answers, {"losses": self.losses})
        self.losses = []
        order_line = "" if self._orders is None else self._orders.readline()
        if order_line:
            self._left = json.loads(order_line)["steps"]
        else:
            control.should_training_stop = True


def main(path: str, orders: IO[str], answers: IO[str]) -> None:
    """Serve orders until there are no more."""
    spec = json.loads(Path(path).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    rows = importlib.import_module("safetensors.torch").load_file(spec["rows"])
    # what libraries load when they are first used is there before memory is counted
    first = {name: column[: spec["batch_size"]] for name, column in rows.items()}
    train_by_orders(spec, spec["rehearsal"], first, OrderedSteps(1))
    gc.collect()
    _print_posttrain(answers, {"version": importlib.import_module("trl").__version__})
    order_line = orders.readline()
    if order_line:
        train_by_orders(spec, spec["model"], rows, OrderedSteps(json.loads(order_line)["steps"], orders, answers))


def train_by_orders(spec: dict[str, Any], directory: str, rows: dict[str, Any], turns: OrderedSteps) -> None:
    """Make as many steps as there are orders for."""
    trl = importlib.import_module("trl")
    is_sft = spec["objective"] == "sft"
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "output_dir": folder,
            "per_device_train_batch_size": spec["batch_size"] if is_sft else spec["batch_size"] // 2,
            "max_steps": len(rows["ids"]) // spec["batch_size"],
            "learning_rate": spec["lr"],
            "lr_scheduler_type": "constant",
            "adam_beta2": spec["beta2"],
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "max_length": rows["ids"].shape[1],
            "report_to": [],
            "logging_strategy": "no",
            "save_strategy": "no",
            "disable_tqdm": True,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "dataloader_pin_memory": False,
        }
        shared = {
            "train_dataset": _make_dataset(rows, is_sft=is_sft),
            "processing_class": _word_tokenizer(),
            "callbacks": [turns],
        }
        if is_sft:
            trainer = _paced_trainer(trl.SFTTrainer)(_load_model(directory), trl.SFTConfig(**settings), **shared)
        else:
            is_stored = spec["stored_reference"]
            args = trl.DPOConfig(**settings, beta=0.1, precompute_ref_log_probs=is_stored)
            reference = None if is_stored else _load_model(directory)
            trainer = _paced_trainer(trl.DPOTrainer)(_load_model(directory), reference, args, **shared)
        trainer.turns = turns
        trainer.train()


def _paced_trainer(kind: Any) -> Any:
    """A trainer of a kind that takes rows as they are, in their order, and keeps its losses."""

    class PacedTrainer(kind):  # type: ignore[misc]
        turns: OrderedSteps

        def _prepare_dataset(self, dataset: Any, *given: Any, **more: Any) -> Any:
            return dataset

        def _get_train_sampler(self, *given: Any, **more: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, *given: Any, **more: Any) -> Any:
            loss = super().compute_loss(*given, **more)
            self.turns.losses.append(float(loss.detach()))
            return loss

    return PacedTrainer


def _load_model(directory: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)


def _word_tokenizer() -> Any:
    """A tokenizer, which trainers ask for the number of the padding."""
    tokenizers = importlib.import_module("tokenizers")
    end_token, padding = "<end>", "<padding>"
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({end_token: 0, padding: _PADDING}, unk_token=end_token))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end_token, pad_token=padding)


def _make_dataset(rows: dict[str, Any], *, is_sft: bool) -> Any:
    """The rows as the trainers have them once they are tokenized."""
    lines = list(zip(*(rows[name].tolist() for name in ("ids", "prompts", "lengths")), strict=True))
    if is_sft:
        examples = [
            {"input_ids": ids[:length], "labels": [_IGNORE] * prompt + ids[prompt:length]}
            for ids, prompt, length in lines
        ]
    else:
        examples = [
            {"prompt_ids": ids[:prompt], "chosen_ids": ids[prompt:length], "rejected_ids": other[prompt:rest]}
            for (ids, prompt, length), (other, _, rest) in zip(lines[0::2], lines[1::2], strict=True)
        ]
    return importlib.import_module("datasets").Dataset.from_list(examples)


def _print_posttrain(answers: IO[str], what: dict[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


if __name__ == "__main__":
    real, sys.stdout = sys.stdout, sys.stderr
    main(sys.argv[1], sys.stdin, real)
