"""``phalanx model``: look at a model directory, make one that can be trained, compare one with a run."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures


def merge(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="Model directory, in the hub's layout.")],
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="Adapter directory, in peft's format.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New directory.")],
) -> Answer:
    """Add an adapter (LoRA, DoRA, rsLoRA) to a model's weights; the old weights are saved for unmerge."""
    from phalanx.checkpoint.merge import merge_adapter

    merged_facts = merge_adapter(base, adapter, out)
    print_figures(merged_facts)
    return Answer({"directory": out, **merged_facts})


def unmerge(
    merged: Annotated[Path, typer.Argument(metavar="MERGED", help="Directory that merge wrote.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New directory.")],
) -> Answer:
    """Restore the model before the merge, bit for bit, and compare its digest."""
    from phalanx.checkpoint.merge import unmerge_adapter

    unmerged_facts = unmerge_adapter(merged, out)
    print_figures(unmerged_facts)
    return Answer({"directory": out, **unmerged_facts})


model_app = typer.Typer(
    no_args_is_help=True,
    help="Inspect, import, convert and merge models in the hub's layout; compare a model with a run.",
)
model_app.command(epilog="Example: phalanx model merge models/base models/my-dora models/merged")(merge)
model_app.command(epilog="Example: phalanx model unmerge models/merged models/base-again")(unmerge)

Source = Annotated[Path, typer.Argument(metavar="DIR", help="Directory in the hub's layout.")]
Foreign = Annotated[Path, typer.Argument(metavar="DIR|FILE.gguf", help="Directory of the hub, or a GGUF file.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="New directory.")]


@model_app.command(epilog="Example: phalanx model inspect models/Qwen3-0.6B --json")
def inspect(directory: Source) -> Answer:
    """Print family, sizes, files and tokenizer of a model, and reasons why a run would refuse it."""
    from phalanx.models.inspection import inspect_model

    facts = inspect_model(directory)
    print_figures({name: value for name, value in facts.items() if name != "refused"})
    print_figures({"refused": "; ".join(facts["refused"]) or "none: a run can train it"})
    return Answer(facts)


@model_app.command(
    "import",
    epilog="Example: phalanx model import downloads/opt-125m models/opt-125m\n\n"
    "Example: phalanx model import downloads/tiny.Q8_0.gguf models/tiny",
)
def import_(directory: Foreign, out: Out) -> Answer:
    """Copy a model so that a run can train it: safetensors, a tokenizer.json, every shape compared with the config.

    Pickled weights, other tokenizer files and GGUF files are read in a sandbox without network. The quantised numbers
    of a GGUF file become float32 numbers of the same value, which differ from the original weights.
    """
    from phalanx.models.imported import import_model

    import_model(directory, out)
    typer.echo(f'{out}: in the run file: model.path = "{out}"')
    return Answer({"directory": out})


@model_app.command(epilog="Example: phalanx model convert downloads/old-model models/old-model")
def convert(directory: Foreign, out: Out) -> Answer:
    """Convert pickled weights to safetensors, in a sandbox without network; copy tokenizer files unchanged.

    GGUF is written by phalanx export; for other families llama.cpp's convert_hf_to_gguf.py reads a directory of phalanx
    checkpoint export.
    """
    from phalanx.models.imported import import_model

    import_model(directory, out, makes_tokenizer=False)
    typer.echo(f"{out}: weights in safetensors")
    return Answer({"directory": out})


@model_app.command(
    epilog="Example: phalanx model verify models/first runs/first --certificate pinned/owner.pem\n\n"
    "Example: phalanx model verify edge/first runs/first --signer FINGERPRINT\n\n"
    "Exit codes: 0 equal, 5 changed, foreign or signed by another key, 7 an export that nobody compared with its model."
)
def verify(
    directory: Source,
    origin: Annotated[
        Path | None, typer.Argument(metavar="RUN_DIR|MODEL_DIR", help="What it is said to have been made from.")
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option("--certificate", metavar="FILE", help="Copy of the owner's certificate that you keep."),
    ] = None,
    signer: Annotated[
        str | None,
        typer.Option("--signer", metavar="FINGERPRINT", help="Expected key of the statement of phalanx export."),
    ] = None,
) -> Answer:
    """Compare weights, config and tokenizer of a model or adapter with its run, or an export with its statement."""
    from phalanx.edge import STATEMENT_FILE
    from phalanx.errors import ConfigError
    from phalanx.train import PastRun, verify_run_export

    if (directory / STATEMENT_FILE).is_file() or signer is not None:
        return _verify_export(directory, origin, certificate, signer)
    if origin is None:
        raise ConfigError(f"{directory}: has no {STATEMENT_FILE}; name the run that is said to have made it")
    past = PastRun(origin, certificate)
    digest = verify_run_export(past, directory)
    figures = {"verdict": "weights, config and tokenizer are the run's", "run": past.run_id, "digest": digest}
    print_figures(figures)
    return Answer(figures)


def _verify_export(directory: Path, origin: Path | None, certificate: Path | None, signer: str | None) -> Answer:
    """Compare what phalanx export wrote with its statement, and with the run or model that is said to be its source."""
    from phalanx.cli.models.export import UNCHECKED
    from phalanx.edge import CHECKED, compare_run, compare_source, verify_statement
    from phalanx.train import PastRun

    export = verify_statement(directory, signer)
    if origin is not None and (origin / "config.toml").is_file():
        past = PastRun(origin, certificate)
        compare_run(export, past.run_id, lambda step: past.open_verified(step).path)
    elif origin is not None:
        compare_source(export, origin)
    source = export.facts.source
    figures = {
        "verdict": "files are those of the statement" + (", made from this source" if origin is not None else ""),
        "format": f"{export.facts.format} {export.facts.precision}",
        "comparison": export.facts.state,
        "weights": source.weights,
        "run": source.run,
        "step": source.step,
        "signer": export.signer,
        "trust": "the expected key"
        if export.is_expected
        else "not verified: give --signer after you checked its owner",
    }
    print_figures({key: value for key, value in figures.items() if value is not None})
    return Answer({**figures, "files": export.files}, exit_code=0 if export.facts.state == CHECKED else UNCHECKED)
