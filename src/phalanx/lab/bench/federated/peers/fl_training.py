"""Training of sites for every peer: PEFT, AdamW, report lines, and the orders that rounds wait for.

The file of the order is named by ``PHALANX_FL_SPEC``. A site appends to ``NAME.jsonl`` beside it.
"""

import importlib
import json
import os
import time
from pathlib import Path
from typing import IO, Any

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", CUDA_VISIBLE_DEVICES="")

VARIABLE = "PHALANX_FL_SPEC"
ORDERS, ANSWERS = "orders", "answers"


def read_spec() -> dict[str, Any]:
    """Read the order of the bench."""
    spec: dict[str, Any] = json.loads(Path(os.environ[VARIABLE]).read_text(encoding="utf-8"))
    return spec


def start_weights(spec: dict[str, Any]) -> dict[str, Any]:
    """Read the adapter that all start from."""
    tensors: dict[str, Any] = importlib.import_module("safetensors.torch").load_file(spec["start"])
    return tensors


class LocalTraining:
    """A model in memory, with the rows of one site."""

    def __init__(self, spec: dict[str, Any], site: str) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._torch.set_num_threads(1)
        transformers, peft = importlib.import_module("transformers"), importlib.import_module("peft")
        config = transformers.AutoConfig.from_pretrained(spec["model"], local_files_only=True)
        config.num_hidden_layers = spec["layers"]
        base_model = transformers.AutoModelForCausalLM.from_pretrained(
            spec["model"], config=config, dtype=self._torch.float32, local_files_only=True
        )
        lora = peft.LoraConfig(r=spec["rank"], lora_alpha=spec["alpha"], target_modules=spec["targets"])
        self._model = peft.get_peft_model(base_model, lora)
        self._model.train()
        self._weights = {
            name.removeprefix("base_model.model.").replace(".default.", "."): parameter
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad
        }
        rows = importlib.import_module("safetensors.torch").load_file(spec["rows"])
        self._ids, self._labels = rows[f"{site}/ids"], rows[f"{site}/labels"]
        self._spec, self._lines = spec, Path(spec["directory"]) / f"{site}.jsonl"
        self._append_report({"load": 1})

    def train(self, number: int, start: dict[str, Any]) -> dict[str, Any]:
        """Train one round and return the weights."""
        torch, spec = self._torch, self._spec
        began, used = time.perf_counter(), time.thread_time()
        with torch.no_grad():
            for name, parameter in self._weights.items():
                parameter.copy_(torch.as_tensor(start[name]))
        optimizer = torch.optim.AdamW(self._weights.values(), spec["lr"], tuple(spec["betas"]), weight_decay=0.0)
        total, targets, size = 0.0, 0, spec["batch_size"]
        for step in range(spec["local_steps"]):
            start_row = ((number - 1) * spec["local_steps"] + step) * size
            ids, labels = self._ids[start_row : start_row + size], self._labels[start_row : start_row + size]
            logits = self._model(input_ids=ids, use_cache=False).logits
            count = int((labels != -100).sum())
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            optimizer.zero_grad()
            (loss / count).backward()
            torch.nn.utils.clip_grad_norm_(self._weights.values(), 1.0)
            optimizer.step()
            total, targets = total + float(loss.detach()), targets + count
        update = {name: parameter.detach().clone() for name, parameter in self._weights.items()}
        report = {"round": number, "loss": total / targets, "train_s": time.perf_counter() - began}
        both_ways = 2 * sum(tensor.numel() * tensor.element_size() for tensor in update.values())
        self._append_report({**report, "train_cpu_s": time.thread_time() - used, "bytes": both_ways})
        return update

    def _append_report(self, line: dict[str, Any]) -> None:
        with self._lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class OrderedRounds:
    """The server's rounds, which wait for orders and are answered for."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._sites, self._directory = list(spec["sites"]), Path(spec["directory"])
        self._read = dict.fromkeys(self._sites, 0)
        self._orders: IO[str] = (self._directory / ORDERS).open(encoding="utf-8")
        self._answers: IO[str] = (self._directory / ANSWERS).open("w", encoding="utf-8")
        self._left = 0

    def begin(self) -> bool:
        """Wait until a round is asked for; return whether one is."""
        if not self._left:
            order_line = self._orders.readline()
            if not order_line:
                return False
            self._left = json.loads(order_line)["rounds"]
        return True

    def end(self) -> None:
        """Answer where this was the last round of an order."""
        self._left -= 1
        if not self._left:
            self._answers.write(
                json.dumps({"sites": {site: self._unread_reports(site) for site in self._sites}}) + "\n"
            )
            self._answers.flush()

    def _unread_reports(self, site: str) -> list[dict[str, Any]]:
        path = self._directory / f"{site}.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        read, self._read[site] = self._read[site], len(lines)
        return [json.loads(row) for row in lines[read:]]
