"""Train equal rows with the HF Trainer and with Phalanx: losses, weights, CPU time of all processes, and memory.

``python -m phalanx.lab.bench.alone.hf_trainer OUT.json [--arms ARM ...]``

Each arm starts from the same weights and sees the same rows in the same order. CPU time a token is that of the whole
process tree, taken from the difference between a long and a short training, so that imports and start are not in it.
Wall times are not compared: the machine had other work. Nothing here was measured on a GPU.
"""

# ruff: noqa: PLC0415 - each child loads nothing but what it measures

import json
import os
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

SHORT, LONG, ROWS, LENGTH, MICROBATCHES = 3, 43, 16, 128, 8
SHAPE: dict[str, float] = {"vocab_size": 1024, "n_positions": LENGTH, "n_embd": 128, "n_layer": 4, "n_head": 4}
SHAPE |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
RUN = """
[model]
path = "model"
[data]
sources = [{{ kind = "python_manual" }}]
tokenizer = {{ kind = "bpe", vocab_size = 1024 }}
sequence_length = {length}
max_documents = 60
[train]
steps = {steps}
batch_size = {rows}
microbatches = {microbatches}
[optimizer]
lr = 1e-3
betas = [0.9, 0.999]
weight_decay = 0.0
schedule = "constant"
[checkpoint]
every = 1000
"""
_THIS = "phalanx.lab.bench.alone.hf_trainer"
ARMS = {
    "phalanx, one rank": "[parallel]\ndp = 1\n",
    "phalanx, four stages": '[pipeline]\nstages = 4\n[guard]\nmode = "off"\n',
    "phalanx, four stages, guarded": '[pipeline]\nstages = 4\n[guard]\npreset = "standard"\n',
}


def measure(arms: list[str] | None = None) -> dict[str, Any]:
    """Play every arm in processes of its own."""
    from phalanx.lab.bench.measure.harness import run_module

    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        os.environ |= {"PHALANX_CACHE": f"{name}/cache", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        run_module(_THIS, "model", "0")
        titles = ("HF Trainer", *ARMS)
        rows = [arm_row(title) if title in (arms or titles) else null_row(title) for title in titles]
        os.chdir("/")
    first = rows[0]
    for row in rows if first["losses"] else ():
        if row["losses"] is not None:
            losses = zip(row["losses"], first["losses"], strict=True)
            row["largest_loss_difference"] = max(abs(loss - other) / other for loss, other in losses)
            row["cpu_over_hf"] = row["cpu_us_per_token"] / first["cpu_us_per_token"]
    shape = {"rows_a_step": ROWS, "tokens_a_row": LENGTH, "microbatches": MICROBATCHES, "steps": LONG, **SHAPE}
    return {"shape": shape, "rows": rows}


def arm_row(title: str) -> dict[str, Any]:
    """Train short and long, and return the figures of one arm; null for one without a measurement."""
    from phalanx.lab.bench.measure.harness import run_module

    short, long = (run_module(_THIS, title, str(steps)) for steps in (SHORT, LONG))
    report, tokens = long.last_answer(), (LONG - SHORT) * ROWS * LENGTH
    return {
        "arm": title,
        "losses": report["losses"],
        "cpu_us_per_token": 1e6 * (long.cpu_s - short.cpu_s) / tokens,
        "peak_memory_bytes": report["memory"],
        "gpu_tokens_per_s": None,
        "gpu_mfu": None,
    }


def null_row(title: str) -> dict[str, Any]:
    """Return an arm that this call leaves out."""
    names = ("losses", "cpu_us_per_token", "peak_memory_bytes", "gpu_tokens_per_s", "gpu_mfu")
    return {"arm": title, **dict.fromkeys((*names, "largest_loss_difference", "cpu_over_hf"))}


def print_report(losses: list[float]) -> None:
    """Print the figures of a child."""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.write("\n" + json.dumps({"losses": losses, "memory": memory}) + "\n")


def make_model() -> None:
    """Write random weights that every arm begins with."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    GPT2LMHeadModel(GPT2Config(**SHAPE)).save_pretrained("model")
    print_report([])


def run_of(section: str, steps: int) -> Any:
    """Return a run file with one engine."""
    from phalanx.train import load_run

    text = RUN.format(length=LENGTH, steps=steps, rows=ROWS, microbatches=MICROBATCHES)
    Path("run.toml").write_text(text + section)
    return load_run(Path("run.toml"))


def play_phalanx(title: str, steps: int) -> None:
    """Train one arm of ours."""
    import io

    from rich.console import Console

    import phalanx
    from phalanx.telemetry import read_metrics

    home = Path(f"runs/{title.replace(' ', '-')}-{steps}")
    phalanx.train(run_of(ARMS[title], steps), home, console=Console(file=io.StringIO()))
    print_report([line["loss"] for line in read_metrics(home / "metrics.jsonl")])


def play_hf(steps: int) -> None:
    """Train the same rows with the HF Trainer."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

    from phalanx.data import BatchLoader
    from phalanx.data.preparation import prepare_corpus

    run = run_of(ARMS["phalanx, one rank"], steps)
    loader = BatchLoader(prepare_corpus(run.data, Path("cache"), run.train.seed), ROWS, run.train.seed)
    batches = [loader.next_batch() for _ in range(steps)]
    rows = [
        {"input_ids": ids.long(), "labels": labels.long()}
        for batch in batches
        for ids, labels in zip(batch.input_ids, batch.labels, strict=True)
    ]
    losses: list[float] = []

    def loss_of(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        # labels are shifted as rows come: position i foretells what stands at i + 1
        total = cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        losses.append(float(total.detach()))
        # of labels that count: at the beginning of a document nothing is foretold
        return total / num_items_in_batch

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(rows)

    arguments = TrainingArguments(
        output_dir="hf",
        max_steps=steps,
        per_device_train_batch_size=ROWS // MICROBATCHES,
        gradient_accumulation_steps=MICROBATCHES,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        weight_decay=0.0,
        max_grad_norm=1.0,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    model = GPT2LMHeadModel.from_pretrained("model")
    InOrder(model=model, args=arguments, train_dataset=rows, compute_loss_func=loss_of).train()
    sums = [sum(losses[at : at + MICROBATCHES]) for at in range(0, len(losses), MICROBATCHES)]
    print_report([total / int((batch.labels != -100).sum()) for total, batch in zip(sums, batches, strict=True)])


if __name__ == "__main__":
    if not sys.argv[-1].isdecimal():
        from phalanx.lab.bench.measure.harness import run_program

        run_program("hf-trainer", measure)
    elif sys.argv[1] == "model":
        make_model()
    elif sys.argv[1] == "HF Trainer":
        play_hf(int(sys.argv[2]))
    else:
        play_phalanx(sys.argv[1], int(sys.argv[2]))
