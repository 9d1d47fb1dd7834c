"""A new run that goes on where another one is, with other stages, workers, copies or guards."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from phalanx.checkpoint import Checkpoint, Shard, manifest_digest
from phalanx.config import digest_config
from phalanx.errors import CheckpointError, ConfigError
from phalanx.optimizers import learning_rate
from phalanx.train.config import RunConfig
from phalanx.train.records.check_record import CheckRecord, adopted_record
from phalanx.train.records.past_run import PastRun
from phalanx.train.setup.stage_source import StageLibrary

_SAME_SECTIONS = ("model", "data", "optimizer")
_STEPS_BEFORE = "train_steps_before"
_SAME_IN_TRAIN = ("seed", "batch_size", "precision", "numerics", "objective")


def check_adoption(run: RunConfig, past: PastRun) -> None:
    """Refuse a run that would not be the continuation of another one.

    Stages, copies, guard and paths may differ, and there may be more steps; model, data and objective may not.
    """
    if run.train.steps < past.config.train.steps:
        raise ConfigError(
            f"train.steps: {run.train.steps} are fewer than the {past.config.train.steps} of {past.path}; give as many "
            "or more"
        )
    pairs = [(name, getattr(run, name), getattr(past.config, name)) for name in _SAME_SECTIONS]
    pairs += [("objectives", getattr(run, "objectives", ()), getattr(past.config, "objectives", ()))]
    pairs += [(f"train.{name}", getattr(run.train, name), getattr(past.config.train, name)) for name in _SAME_IN_TRAIN]
    for name, mine, theirs in pairs:
        if mine != theirs:
            raise ConfigError(
                f"{name}: differs from {past.path}, so its checkpoint cannot be continued; see "
                f"{past.path / 'config.toml'}"
            ).with_facts(code="PHX-C016", key=name)


def describe_schedule_change(run: RunConfig, past: RunConfig, step: int) -> str | None:
    """Say what more steps change: the learning rate from here on; None where there are as many as before."""
    was, now = past.train.steps, run.train.steps
    if was == now:
        return None
    rates = [learning_rate(run.optimizer, at_step, steps) for at_step, steps in ((max(0, step - 1), was), (step, now))]
    return (
        f"train.steps: {was} -> {now}. Steps before {step} stay unchanged. From step {step} on the learning rate "
        f"follows the schedule of {now} steps: {rates[1]:.3g}, after {rates[0]:.3g} where the other run ended. "
        "Weights, optimizer, order of the data and seeds go on; the run, its log and its keys are new."
    )


def open_origin(run: RunConfig, path: Path, say: Callable[[str], None]) -> Checkpoint:
    """Open the newest checkpoint of the run in a directory, which `run` is to go on from.

    Args:
        say: Is told what more steps change, where there are more.
    """
    past = PastRun(path)
    check_adoption(run, past)
    checkpoint = past.open_verified()
    note_verdicts(checkpoint, past)
    note = describe_schedule_change(run, past.config, checkpoint.step)
    if note is not None:
        checkpoint.state[_STEPS_BEFORE] = past.config.train.steps
        say(note)
    return checkpoint


def note_verdicts(checkpoint: Checkpoint, past: PastRun) -> None:
    """Add to a checkpoint's record what its run has found out since it was written."""
    record = _record_of(checkpoint)
    for verdict in past.verdicts:
        # a party may have been convicted after the checkpoint was written
        record.observe("verdict", verdict)
    checkpoint.state["figures"]["checks"] = record.to_json()


def adopted_state(checkpoint: Checkpoint, run: RunConfig, run_id: str) -> dict[str, Any]:
    """Return the state of the new run's first checkpoint beside the tensors: doubtful steps stay in doubt."""
    origin: dict[str, Any] = {"run": checkpoint.run, "step": checkpoint.step}
    origin["manifest"] = manifest_digest(checkpoint.path)
    saved = dict(checkpoint.state)
    # what the other run's directory keeps is not in this one
    saved.pop("kept", None)
    if _STEPS_BEFORE in saved:
        origin["train_steps"] = [saved.pop(_STEPS_BEFORE), run.train.steps]
    checks = adopted_record(_record_of(checkpoint).to_json(), checkpoint.run)
    figures = {**checkpoint.state["figures"], "checks": checks}
    return {**saved, "figures": figures, "run": run_id, "config_digest": digest_config(run), "origin": origin}


def _record_of(checkpoint: Checkpoint) -> CheckRecord:
    record = CheckRecord()
    try:
        record.load_json(checkpoint.state["figures"]["checks"])
    except (KeyError, TypeError) as exc:
        raise CheckpointError(f"{checkpoint.path}: its state lacks {exc}; it is from another version") from exc
    return record


def recut_checkpoint(checkpoint: Checkpoint, library: StageLibrary) -> Iterator[Shard]:
    """Yield the shards of another layout: each stage's tensors by name, from whichever stage held them."""
    unread = set(checkpoint.stages_by_tensor())
    for stage in range(library.num_stages):
        names = library(stage).optimizer.state_tensors().keys()
        unread -= names
        yield Shard(stage, checkpoint.read_tensors(names), checkpoint.step)
    if unread:
        raise CheckpointError(
            f"{checkpoint.path}: has unexpected tensors {sorted(unread)[:3]}; it belongs to another model"
        )
