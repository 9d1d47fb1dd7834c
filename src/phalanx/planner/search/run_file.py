"""The best layout written down as a run file."""

from pathlib import Path
from typing import Any

import tomli_w

from phalanx.errors import InputError, writing_cure
from phalanx.planner.cluster.catalog import known_configs
from phalanx.planner.cost.estimate import Estimate
from phalanx.planner.model.recipe import Recipe

_UNTRUSTED = ("pipeline", "guard", "attack")
"""Sections of runs across trust domains, which a run inside one does not have."""
_KEPT = ("outer", "restarts", "silence_s", "unsafe_public_network")
"""Of a section ``[parallel]``: what is true of every layout."""


def write_run(path: Path, data: dict[str, Any], estimate: Estimate) -> None:
    """Write a run file.

    Args:
        data: The run file that was planned for, or what stands in for it; every section is kept but those for guards
            between domains.
        estimate: The layout to write into ``[parallel]``, with its microbatches and checkpointing.
    """
    try:
        path.write_text(run_text(data, estimate), encoding="utf-8")
    except OSError as exc:
        raise InputError(f"{path}: cannot be written ({exc.strerror}); {writing_cure(exc)}") from exc


def run_text(data: dict[str, Any], estimate: Estimate) -> str:
    """Return a run file as TOML text; for its arguments see `write_run`."""
    run = {key: value for key, value in data.items() if key not in _UNTRUSTED}
    run["train"] = {**run.get("train", {}), "microbatches": estimate.recipe.microbatches}
    run["model"] = {key: value for key, value in run.get("model", {}).items() if key != "activation_checkpointing"}
    before = run.get("parallel") or {}
    run["parallel"] = {**estimate.layout.parallel_section(), **{key: before[key] for key in _KEPT if key in before}}
    if estimate.layout.replicas > 1:
        run["parallel"]["replicas"] = estimate.layout.replicas
    if estimate.recipe.sequence_parallel:
        run["parallel"]["sequence_parallel"] = True
    if estimate.recipe.checkpointing != "none":
        run["parallel"]["activation_checkpointing"] = estimate.recipe.checkpointing
    return (
        f"# {estimate.layout}, as phalanx plan chose it: {estimate.tokens_per_s:.4g} tokens/s\n\n{tomli_w.dumps(run)}"
    )


def new_run(model: str, recipe: Recipe, tokens: float | None) -> dict[str, Any]:
    """Return a run from a model's config alone, on the text that every Python brings along.

    Args:
        model: A config.json, its directory, or the name of a known model.
        recipe: Training recipe; the weights of a run are in fp32, whatever it computes in.
        tokens: Tokens of the training; None is one step.
    """
    steps = max(1, round((tokens or 0.0) / recipe.tokens_per_step))
    return {
        "model": {**_model_origin(model), "from_scratch": True},
        "data": {
            "sources": [{"kind": "python_manual"}, {"kind": "python_docstrings"}],
            "tokenizer": {"kind": "bpe", "vocab_size": 2048},
            "sequence_length": recipe.sequence_length,
        },
        "train": {
            "steps": steps,
            "batch_size": recipe.sequences,
            "precision": "bf16" if recipe.precision == "autocast" else recipe.precision,
        },
        "optimizer": {"lr": 3e-4},
    }


def _model_origin(model: str) -> dict[str, Any]:
    shipped = known_configs()
    if model in shipped:
        return {"architecture": shipped[model]}
    path = Path(model)
    return {"path": str(path if path.is_dir() else path.parent)}
