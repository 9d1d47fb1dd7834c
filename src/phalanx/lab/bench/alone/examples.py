"""What do the examples learn? The program reads a finished run of ``examples/EXAMPLE.toml``.

``python -m phalanx.lab.bench.alone.examples OUT.json --example EXAMPLE --run-dir RUN_DIR``

- `sft`, `dpo`, `dpo_harmless`, `reward_harmless` (with ``--held-out PAIRS``, as the run prints at its beginning):
  losses and held-out figures. In a run of `dpo` a liar is evicted on the way.
- `federated_cohorts`: how many of the sites were asked in all, losses and held-out figures.
- `mixed`: the curve of each objective, and the held-out figures of each.
- `qlora`: also the memory of a training step of the whole model, in a process for each arm, beside LoRA's.
- `grpo`, `ppo`: mean reward of the texts of a step, and of the likeliest texts to held-out prompts.
- `bert`, `t5` (with ``--model DIR`` from `phalanx checkpoint export RUN_DIR DIR`): perplexity on words, beside unigrams
  that are counted, plus one each, over the words that the run's first batches predict. Words are targets that are
  neither sentinels nor ends.
"""

import json
import math
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from phalanx.config import digest_config
from phalanx.data import IGNORE, Batch, prepare_corpus
from phalanx.data.loader import BatchLoader, validation_batches
from phalanx.evaluate import share_with_interval
from phalanx.lab.bench.measure.harness import run_program
from phalanx.lab.bench.measure.resident import added_at_peak, give_back_freed_memory, read_resident, reset_peak
from phalanx.models import ModelConfig, ModelSource, StageSpec, build_stage, open_model, with_marks
from phalanx.models.master_weights import keep_masters
from phalanx.objectives import causal_lm_loss
from phalanx.telemetry import read_metrics
from phalanx.train import RunConfig, load_run
from phalanx.train.batches.rewriting import rewrite_held_out, rewriting_of

Figures = dict[str, Any]
Example = Literal[
    "bert", "dpo", "dpo_harmless", "federated_cohorts", "grpo", "mixed", "ppo", "qlora", "reward_harmless", "sft", "t5"
]
QLORA_ARMS = {"lora": None, "lora_bf16": None, "int8": "int8", "nf4": "nf4"}
"""Storage of the frozen matrices; None: float32, or bf16 with float32 masters of the adapter."""
_STEPS, _TOKENS, _BATCHES = 2, (2, 96), 300


class FinishedRun:
    """The run file, summary and metrics of a run; exits where the directory holds no finished run of that file."""

    def __init__(self, example: str, run_dir: Path, model: Path | None, held_out: int) -> None:
        self.example, self.run_dir, self.model, self.num_held_out = example, run_dir, model, held_out
        self.file = Path("examples") / f"{example}.toml"
        self.config = load_run(self.file)
        self.summary: Figures = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        if self.summary["config_digest"] != digest_config(self.config) or self.summary["status"] != "completed":
            sys.exit(f"{run_dir}: is no finished run of {self.file}")
        self.lines = read_metrics(run_dir / "metrics.jsonl")

    def perplexities(self) -> list[list[float]]:
        """Held-out perplexities with the steps they were measured after; at 0, that of the untouched model."""
        # the first line has the figure of the untouched model
        pairs = [(line["step"] + 1, line.get("validation_perplexity")) for line in self.lines[1:]]
        first = [0, self.summary["validation_perplexity_first"]]
        return [first, *([step, value] for step, value in pairs if value is not None)]

    def losses(self) -> list[float]:
        """The loss of every step that has one."""
        return [line["loss"] for line in self.lines if math.isfinite(line["loss"])]

    def select(self, *names: str) -> Figures:
        """Return some figures of the summary."""
        return {name: self.summary[name] for name in names}


def measure(example: Example, run_dir: Path, model: Path | None = None, held_out: int = 0) -> Figures:
    """Return the figures of one finished run."""
    run, read = FinishedRun(example, run_dir, model, held_out), EXAMPLES[example]
    name = "rollouts" if read is read_rollouts else f"{example.replace('_', '-')}-example"
    return {"name": name, "run": run.file.name, **run.select("steps", "wall_s"), **read(run)}


def read_sft(run: FinishedRun) -> Figures:
    """Supervised fine-tuning."""
    return {**run.select("audits"), "held_out_perplexity": run.perplexities(), "loss": run.losses()}


def read_dpo(run: FinishedRun) -> Figures:
    """Preference tuning: of people's judgements of harmlessness, or of made pairs."""
    names = ("accuracy", "margin", "kl", "loss")
    held_out = [
        {name: line[f"validation_{name}"] for name in names} | {"step": line["step"] + 1}
        for line in run.lines
        if "validation_accuracy" in line
    ]
    figures = {"held_out": held_out, "loss": run.losses()}
    if run.example == "dpo":
        return figures | run.select("attacks_injected", "detections", "evicted")
    pairs = run.config.data.max_validation_sequences
    return figures | {
        "pairs_held_out": pairs,
        "interval": share_with_interval(round(held_out[-1]["accuracy"] * pairs), pairs),
    }


def read_mixed(run: FinishedRun) -> Figures:
    """Several objectives at once, on a growing amount of the first one's data."""
    first = run.lines[0]["objectives"]
    parts = [line["objectives"] for line in run.lines]
    sizes = ("weight", "rows", "tokens")
    held_out = [
        {"step": line["step"] + 1, "main": {"perplexity": line["validation_perplexity"]}, **line["validation_sets"]}
        for line in run.lines
        if "validation_sets" in line
    ]
    return {
        **run.select("audits", "attacks_injected", "detections", "evicted"),
        "objectives": {name: {key: part[key] for key in sizes} for name, part in first.items()},
        "curves": {name: [part[name]["loss"] for part in parts] for name in first},
        "held_out": held_out,
        "loss": run.losses(),
    }


def read_reward(run: FinishedRun) -> Figures:
    """A reward model of people's judgements of harmlessness."""
    preferences, pairs = run.summary["preferences"], run.num_held_out
    right = preferences["accuracy"] * pairs
    if abs(2 * right - round(2 * right)) > 1e-6:
        sys.exit(f"--held-out: {pairs} pairs do not give an accuracy of {preferences['accuracy']}")
    return {"preferences": preferences, "interval": share_with_interval(math.floor(right), pairs), "loss": run.losses()}


def read_cohorts(run: FinishedRun) -> Figures:
    """Rounds in which a few of many simulated sites are asked."""
    lines = map(json.loads, (run.run_dir / "rounds.jsonl").read_text(encoding="utf-8").splitlines())
    asked = [line["asked"] for line in lines if "round" in line]
    return {
        "sites": len(run.summary["federated"]["sites"]),
        "asked_a_round": run.summary["federated"]["asked"],
        "sites_asked": len({site for sites in asked for site in sites}),
        "held_out_perplexity": run.perplexities(),
        "loss": run.losses(),
    }


def read_rollouts(run: FinishedRun) -> Figures:
    """Learning from texts that the model writes."""
    held_out = [line for line in run.lines if "validation_reward_exact" in line]
    row = {
        "run": run.file.name,
        "objective": run.config.train.objective_kind,
        **run.select("steps", "wall_s", "audits"),
        "first_sampled": run.lines[0]["reward_exact"],
        "last_held_out": held_out[-1]["validation_reward_exact"],
        "held_out": [[line["step"] + 1, line["validation_reward_exact"]] for line in held_out],
        "sampled": [[line["step"] + 1, line["reward_exact"]] for line in run.lines],
    }
    return {"rows": [row]}


def read_qlora(run: FinishedRun) -> Figures:
    """Quantised LoRA, and the memory of a step of each arm."""
    memory = {}
    for arm in QLORA_ARMS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            memory[arm] = pool.apply(measure_memory, (arm, str(run.file), str(run.run_dir)))
    return {"held_out_perplexity": run.perplexities(), "loss": run.losses(), "memory": memory}


def measure_memory(arm: str, file: str, run_dir: str) -> dict[str, int]:
    """Bytes of the weights, and what building the model and two steps in bf16 add at their peak."""
    model = load_run(Path(file)).model.model_dump()
    config = ModelConfig.model_validate({**model, "adapter": {**model["adapter"], "quantize": QLORA_ARMS[arm]}})
    source = open_model(config, Path(run_dir).parent / ".cache", 0)
    give_back_freed_memory()
    # libraries load with the first small product
    torch.autograd.backward((torch.ones(8, 8, requires_grad=True) @ torch.ones(8, 8)).sum())
    reset_peak()
    before = read_resident()
    spec = StageSpec(0, 1, 0, source.num_layers)
    stage = build_stage(source, spec, adapter=config.adapter, activation_checkpointing=False, attention="sdpa", seed=1)
    if arm == "lora_bf16":
        keep_masters(stage)
        give_back_freed_memory()
    built = read_resident().anonymous - before.anonymous
    reset_peak()
    optimizer = torch.optim.AdamW(stage.trainable_parameters().values())
    ids = torch.randint(0, source.vocab_size, _TOKENS, generator=torch.Generator().manual_seed(1))
    for _ in range(_STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = stage(ids)
        torch.autograd.backward(causal_lm_loss(logits.float(), ids)[0])
        optimizer.step()
        optimizer.zero_grad()
    # of bf16 both are held: the weights, and the masters of those that are trained
    tensors = [*stage.all_parameters().values(), *stage.computing.values()]
    weights = sum(value.numel() * value.element_size() for value in tensors)
    return {"weights_bytes": weights, "built_bytes": built, "peak_bytes": added_at_peak(before)}


def read_pretraining(run: FinishedRun) -> Figures:
    """Pretraining of an encoder."""
    counts = run.select("audits", "detections", "false_accusations")
    on_words = measure_words(run.config, run.model)
    return {**counts, "held_out_perplexity": run.perplexities(), "on_words": on_words}


def measure_words(run: RunConfig, model: Path | None) -> dict[str, float]:
    """Perplexity of the exported model, and of unigrams, on the words of held-out rows."""
    if model is None:
        sys.exit(f"{run.name}: needs --model, the directory of the exported model")
    with tempfile.TemporaryDirectory() as cache:
        corpus = prepare_corpus(run.data, Path(cache), run.train.seed)
        rewriting = rewriting_of(run, corpus)
        if rewriting is None:
            sys.exit(f"{run.name}: its objective makes no rows of its own")
        special = torch.from_numpy(rewriting.rows.table.special)  # type: ignore[attr-defined]
        loader = BatchLoader(corpus, run.train.draws_per_step, run.train.seed, rewrite=rewriting)
        counts = np.ones(corpus.vocab_size)
        for _ in range(_BATCHES):
            counts += np.bincount(find_words(loader.next_batch(), special)[1].numpy(), minlength=corpus.vocab_size)
        shares = torch.from_numpy(np.log(counts / counts.sum()))
        batches = list(validation_batches(rewrite_held_out(corpus, rewriting), 16))
    targets = [find_words(batch, special)[1] for batch in batches]
    number = sum(map(len, targets))
    return {
        "targets": number,
        "model": math.exp(sum(word_losses(model, batches, special)) / number),
        "unigrams": math.exp(-sum(float(shares[words].sum()) for words in targets) / number),
    }


def find_words(batch: Batch, special: Tensor) -> tuple[Tensor, Tensor]:
    """Where the words of a batch are, bool ``[batch, seq]``, and which."""
    labels = batch.labels
    places = (labels != IGNORE) & ~special[labels.clamp(min=0)]
    return places, labels[places]


@torch.no_grad()
def word_losses(model: Path, batches: list[Batch], special: Tensor) -> Iterator[float]:
    """Yield the summed loss of each batch's words."""
    source = ModelSource(model)
    layers = StageSpec(0, 1, 0, source.num_layers)
    stage = build_stage(source, layers, adapter=None, activation_checkpointing=False, attention="sdpa", seed=0).eval()
    for batch in batches:
        places, words = find_words(batch, special)
        logits = stage(with_marks(batch.input_ids, batch.extras))
        yield float(cross_entropy(logits[places], words, reduction="sum"))


EXAMPLES: dict[Example, Callable[[FinishedRun], Figures]] = {
    "bert": read_pretraining,
    "dpo": read_dpo,
    "dpo_harmless": read_dpo,
    "federated_cohorts": read_cohorts,
    "grpo": read_rollouts,
    "mixed": read_mixed,
    "ppo": read_rollouts,
    "qlora": read_qlora,
    "reward_harmless": read_reward,
    "sft": read_sft,
    "t5": read_pretraining,
}

if __name__ == "__main__":
    run_program("examples", measure)
