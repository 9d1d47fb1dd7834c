"""``phalanx checkpoint``: look at a run's checkpoints, take a model out of one, make and change their keys."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.access_gate import require_approvals
from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures

checkpoint_app = typer.Typer(no_args_is_help=True, help="Verify and export checkpoints; make and change their keys.")

RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run directory, finished or not.")]
Step = Annotated[
    int | None, typer.Option("--step", metavar="STEP", help="Step of the checkpoint; default: the newest.")
]
Best = Annotated[
    bool, typer.Option("--best", help="Take the checkpoint with the best validation; see checkpoint.best.")
]
Certificate = Annotated[
    Path | None, typer.Option("--certificate", metavar="FILE", help="Copy of the owner's certificate that you keep.")
]


@checkpoint_app.command(epilog="Example: phalanx checkpoint verify runs/first --certificate pinned/owner.pem")
def verify(run_dir: RunDir, step: Step = None, best: Best = False, certificate: Certificate = None) -> Answer:
    """Check the signature, every byte and the audit-log entry of a checkpoint; print each fault."""
    _require_run(run_dir)
    from phalanx.train import PastRun

    past = PastRun(run_dir, certificate)
    checkpoint = past.open_verified(step, best=best)
    tensors = [checkpoint.stage_tensors(stage) for stage in checkpoint.stages]
    suffix = ", equal to the audit log's entry" if step is None else ""
    figures = {
        "verdict": f"signed, complete, unchanged{suffix}",
        "checkpoint": str(checkpoint.path),
        "step": checkpoint.step,
        "run": checkpoint.run,
        "signed by": f"{past.owner.name} {past.owner.public_key.hex()}",
        "stages": len(checkpoint.stages),
        "tensors": sum(len(stage) for stage in tensors),
        "bytes": sum(tensor.nbytes for stage in tensors for tensor in stage.values()),
    }
    print_figures(figures)
    return Answer(figures)


@checkpoint_app.command(epilog="Example: phalanx checkpoint export runs/first models/first")
def export(
    run_dir: RunDir,
    out: Annotated[Path, typer.Argument(metavar="DIR", help="New directory, in the hub's layout.")],
    *,
    step: Step = None,
    best: Best = False,
    merge: Annotated[bool, typer.Option("--merge", help="Add the adapter to the model's own weights.")] = False,
    certificate: Certificate = None,
    own_code: Annotated[bool, typer.Option("--own-code", help="Run the code in RUN_DIR/code; read it first.")] = False,
) -> Answer:
    """Export the model or adapter of a verified checkpoint for transformers and peft."""
    _require_run(run_dir)
    from phalanx.governance.release import require_release
    from phalanx.train import PastRun, export_run

    require_release(run_dir, certificate, step=step, best=best)
    past = PastRun(run_dir, certificate)
    last_step = export_run(past, out, step=step, best=best, merge=merge, own_code=own_code)
    typer.echo(f"{out}: weights of step {last_step}")
    return Answer({"directory": out, "step": last_step, "merged": merge})


@checkpoint_app.command("new-key", epilog="Example: phalanx checkpoint new-key secrets/checkpoint.key")
def new_key(file: Annotated[Path, typer.Argument(metavar="FILE", help="New file, readable by you only.")]) -> Answer:
    """Create a random key for encrypted checkpoints; without the key they cannot be read."""
    from phalanx.checkpoint import write_new_key

    name = write_new_key(file)
    typer.echo(f'{file}: key {name}; in the run file: encrypt = true, key = "file:{file}"')
    return Answer({"file": file, "key": name})


@checkpoint_app.command(epilog="Example: phalanx checkpoint rotate runs/first --to file:secrets/next.key")
def rotate(
    run_dir: RunDir,
    to: Annotated[str, typer.Option("--to", metavar="WHERE", help="The new key: file:PATH, env:NAME, command:...")],
    certificate: Certificate = None,
) -> Answer:
    """Wrap all data keys with a new key, then set checkpoint.key to it. No run may be under way."""
    _require_run(run_dir)
    from phalanx.checkpoint import open_key
    from phalanx.checkpoint.kept_model import rotate_kept
    from phalanx.checkpoint.rotate import rotate_keys
    from phalanx.errors import ConfigError
    from phalanx.governance.acts import name_target
    from phalanx.train import PastRun

    past = PastRun(run_dir, certificate)
    old = past.key_holder()
    if old is None:
        raise ConfigError(f"{run_dir}: its checkpoints are not encrypted and have no key to change")
    new = open_key(to)
    require_approvals("key_rotation", lambda: name_target("key_rotation", run_dir), run_dir)
    rotate_kept(past.path, past.run_id, old, new)
    steps = rotate_keys(past.checkpoints, past.owner, old, new)
    typer.echo(f"{past.checkpoints}: steps {steps} now open with the new key only; set checkpoint.key to it")
    return Answer({"checkpoints": past.checkpoints, "steps": steps})


def _require_run(run_dir: Path) -> None:
    """Say that there is no run before torch is imported."""
    from phalanx.train.records.run_directory import run_name

    run_name(run_dir)
