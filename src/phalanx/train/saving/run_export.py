"""A run's checkpoint, verified, as a model directory in the hub's layout."""

from pathlib import Path

from phalanx.checkpoint import Checkpoint
from phalanx.checkpoint.export import RunTokenizer, export_model
from phalanx.checkpoint.kept_model import check_kept, open_kept
from phalanx.data import prepare
from phalanx.models import ModelSource, open_model
from phalanx.train.config import RunConfig
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

    Neither the text of the run is needed, nor the model that it began with, but for an adapter's own.

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
        CheckpointError: There is no such checkpoint, or it is damaged, or what the run directory keeps of the model
            was altered, or `out` exists.
        ConfigError: The run needs code of the user's own, which may not be run.
    """
    config = load_past_code(past.config, past.path, allowed=own_code)
    found = past.open(step, best=best)
    source, tokenizer = _open_model(config, past.path, found)
    export_model(found, source, out, adapter=config.model.adapter, merge=merge, tokenizer=tokenizer)
    return found.step


def _open_model(config: RunConfig, run_dir: Path, found: Checkpoint) -> tuple[ModelSource, RunTokenizer]:
    """The model, with its weights where an adapter belongs to them, and the tokenizer of the run."""
    cache, seed = cache_beside(run_dir), config.train.seed
    is_kept = check_kept(run_dir, found.state)
    if is_kept and config.model.adapter is None:
        return open_kept(run_dir)
    source = open_model(config.model, cache / "models", seed)
    if config.model.adapter is not None:
        found.check_base(source.files_digest())
    if is_kept:
        return source, open_kept(run_dir)[1]
    # a run of before this version
    corpus = prepare(config.data, cache / "data", seed, source.tokenizer_path)
    return source, RunTokenizer.of(config.data.tokenizer, source, corpus)
