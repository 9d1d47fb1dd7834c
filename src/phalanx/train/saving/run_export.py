"""A run's checkpoint, verified, as a model directory in the hub's layout."""

from pathlib import Path

from phalanx.checkpoint.export import RunTokenizer, export_model
from phalanx.data import prepare
from phalanx.models import open_model
from phalanx.train.records.past_run import PastRun
from phalanx.train.records.run_directory import cache_beside
from phalanx.train.setup.preflight import load_past_code


def export_run(
    past: PastRun,
    out: Path,
    *,
    step: int | None = None,
    best: bool = False,
    merge: bool = False,
    own_code: bool = False,
) -> int:
    """Write the model, or the adapter, of a verified checkpoint so that transformers and peft load it.

    Args:
        past: The run.
        out: New directory.
        step: Which checkpoint; None takes the newest.
        best: Take the one with the best validation.
        merge: Add an adapter to the model's own weights.
        own_code: Code of the user's own that the run directory keeps may be run.

    Returns:
        The step of the checkpoint.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged, or `out` exists.
        ConfigError: The run needs code of the user's own, which may not be run.
    """
    config, cache = load_past_code(past.config, past.path, allowed=own_code), cache_beside(past.path)
    source = open_model(config.model, cache / "models", config.train.seed)
    corpus = prepare(config.data, cache / "data", config.train.seed, source.tokenizer_path)
    found = past.open(step, best=best)
    tokenizer = RunTokenizer.of(config.data.tokenizer, source, corpus)
    export_model(found, source, out, adapter=config.model.adapter, merge=merge, tokenizer=tokenizer)
    return found.step
