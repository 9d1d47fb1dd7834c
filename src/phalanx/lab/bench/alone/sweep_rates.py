"""A search for a learning rate beside a full grid: how near it comes, and with which share of the grid's steps.

``python -m phalanx.lab.bench.alone.sweep_rates OUT.json [--points 48] [--steps 40] [--searches 3]``

Grid and search train the same small GPT-2 on the manual of Python, with the same seed, and both are measured by
`phalanx.sweep.RunTrials`: the owner's own loss on held-out text, of the verified checkpoint. The search may take a
third of the grid's steps, those included by which its best two trials are trained again with other seeds.
"""

import contextlib
import io
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from phalanx.errors import ConfigError
from phalanx.lab.bench.measure.harness import run_program
from phalanx.sweep import RunTrials, Sweep, load_sweep

LOW, HIGH = 1e-3, 3e-1
_RUN = """
[model]
from_scratch = true
[model.architecture]
model_type = "gpt2"
vocab_size = 300
n_positions = 32
n_embd = 32
n_layer = 2
n_head = 4
resid_pdrop = 0.0
embd_pdrop = 0.0
attn_pdrop = 0.0
bos_token_id = 0
eos_token_id = 0
[data]
sources = [{{ kind = "python_manual" }}]
tokenizer = {{ kind = "bpe", vocab_size = 300 }}
sequence_length = 32
validation_share = 0.2
max_documents = 24
max_validation_sequences = 64
[train]
steps = {steps}
batch_size = 8
microbatches = 1
seed = 3
[optimizer]
lr = 1e-2
[pipeline]
stages = 1
[checkpoint]
every = 0
journal = false
"""
_SWEEP = """
run = "run.toml"
trials = {trials}
sampler = "{sampler}"
seed = {seed}
max_steps = {max_steps}
[space]
"optimizer.lr" = {space}
[again]
best = {best}
seeds = [{seeds}]
"""


def measure_rates(points: int = 48, steps: int = 40, searches: int = 3) -> dict[str, Any]:
    """Measure every rate of the grid, then search with several seeds.

    Returns:
        The grid's rates with their losses, and for each search its rate, the loss of that trial, the ratio to the best
        rate of the grid (above 1, whichever is larger), and its share of the grid's steps.
    """
    with tempfile.TemporaryDirectory() as spare:
        home = Path(spare)
        (home / "run.toml").write_text(_RUN.format(steps=steps), encoding="utf-8")
        rates = [LOW * (HIGH / LOW) ** (number / (points - 1)) for number in range(points)]
        grid = _search(home, "grid", points=points, space=f"{{ choices = {rates} }}", max_steps=10**9, again=(1, [4]))
        losses = {trial.values["optimizer.lr"]: trial.loss for trial in grid.trials}
        best_rate = min((rate for rate, loss in losses.items() if loss is not None), key=lambda rate: losses[rate] or 0)
        budget, rows = points * steps // 3, []
        for seed in range(searches):
            space = f"{{ low = {LOW}, high = {HIGH}, log = true }}"
            result = _search(
                home, f"gp-{seed}", points=points, space=space, max_steps=budget, again=(2, [4, 5]), seed=seed
            )
            if result.winner is None:
                raise ConfigError(f"--points {points}: a third of their steps is too little for a search; give more")
            winner = result.trials[result.winner]
            rate, best = float(winner.values["optimizer.lr"]), float(best_rate)
            row = {"seed": seed, "trials": len(result.trials), "rate": rate, "loss": winner.loss}
            ratio = max(rate / best, best / rate)
            rows.append({**row, "ratio": ratio, "steps": result.num_steps, "share": result.num_steps / points / steps})
        grid_rows = [{"rate": rate, "loss": loss} for rate, loss in losses.items()]
        facts = {"points": points, "steps": steps, "best_rate": best_rate, "best_loss": losses[best_rate]}
        return {**facts, "grid_steps": points * steps, "searches": rows, "grid": grid_rows}


def _search(
    home: Path, name: str, *, points: int, space: str, max_steps: int, again: tuple[int, list[int]], seed: int = 0
) -> Any:
    text = _SWEEP.format(
        trials=points,
        sampler=name.partition("-")[0],
        seed=seed,
        max_steps=max_steps,
        space=space,
        best=again[0],
        seeds=", ".join(map(str, again[1])),
    )
    (home / f"{name}.toml").write_text(text, encoding="utf-8")
    trials = RunTrials(lambda _directory: contextlib.nullcontext(Console(file=io.StringIO())))
    return Sweep(load_sweep(home / f"{name}.toml"), home / "runs" / name, trials, print).run_search()


if __name__ == "__main__":
    run_program("sweep-rates", measure_rates)
