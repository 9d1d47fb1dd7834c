"""``phalanx export``: a model for llama.cpp or onnxruntime, checked as the runtime reads it."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_error, print_line

if TYPE_CHECKING:
    from phalanx.edge import ExportOrigin

UNCHECKED = 7
EXPORT_EPILOG = (
    "Example: phalanx export runs/first edge/first --format gguf --precision q8_0\n\n"
    "Example: phalanx export models/mine edge/mine --format onnx --precision int4 --json\n\n"
    f"Exit codes: 0 checked, or --no-check, 5 refused by a check, {UNCHECKED} written, but not checked by an "
    "independent runtime, which is not installed."
)


def export(
    source: Annotated[
        Path, typer.Argument(metavar="MODEL_DIR|RUN_DIR", help="A model, or a run, whose newest checkpoint is taken.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New directory.")],
    *,
    kind: Annotated[
        str,
        typer.Option("--format", metavar="gguf|onnx", help="Output format: gguf for llama.cpp, onnx for onnxruntime."),
    ] = "gguf",
    precision: Annotated[
        str, typer.Option("--precision", help="gguf: f32, f16, q8_0, q4_0; onnx: fp32, fp16, int8, int4.")
    ] = "",
    check: Annotated[bool, typer.Option("--check/--no-check", help="Open the file again and compare.")] = True,
    texts: Annotated[int, typer.Option("--texts", min=1, max=10_000_000, help="Fuzzed strings to compare.")] = 500,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help="JSON lines: prompt, harmful; default: ours."),
    ] = None,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=2, max=10_000, help="Prompts to answer.")] = 16,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", metavar="FILE", help="Copy of the run owner's certificate.")
    ] = None,
    signing_key: Annotated[
        Path | None,
        typer.Option("--signing-key", metavar="FILE", help="Signs the statement; default: your key for datasets."),
    ] = None,
) -> Answer:
    """Export a model as GGUF or ONNX; what was written is opened by llama.cpp or onnxruntime and compared first.

    A table of differences is printed and lies beside the model. A model that behaves otherwise after rounding than
    before is refused, and nothing is written. A signed statement names source, settings and digest of each file.
    """
    from phalanx.data.shards import default_signing_key, fingerprint_of, load_signer
    from phalanx.edge import NOT_CHECKED, CheckSizes, ExportOrigin, export_edge, render_table
    from phalanx.errors import VerificationError

    precision = precision or {"gguf": "f16", "onnx": "fp32"}.get(kind, "")
    sizes = CheckSizes(num_texts=texts, num_prompts=num_prompts, prompts=prompts) if check else None
    origin = ExportOrigin(load_signer(signing_key or default_signing_key()))
    with _open_directory(source, certificate, origin) as (directory, origin):
        result = export_edge(directory, out, kind, precision, sizes=sizes, origin=origin)
    facts = {"directory": result.directory, "format": kind, "precision": precision, **result.to_json()}
    facts["signer"] = fingerprint_of(origin.signer)
    if result.rows:
        print_line(render_table(facts["differences"]))
    if result.directory is None:
        beyond = [row["check"] for row in facts["differences"] if row["verdict"] == "beyond bound"]
        error = VerificationError(f"{source}: not exported: {'; '.join(beyond)}: the file differs from the model")
        return Answer(facts, error=error)
    print_line(f"{out}: {kind} {precision}, {result.state}; statement signed by {facts['signer']}")
    if result.state == NOT_CHECKED and check:
        print_error(f"{out}: {NOT_CHECKED}; the table names what is missing")
        return Answer(facts, exit_code=UNCHECKED)
    return Answer(facts)


@contextlib.contextmanager
def _open_directory(
    source: Path, certificate: Path | None, origin: "ExportOrigin"
) -> "Iterator[tuple[Path, ExportOrigin]]":
    """Yield the directory of a model; that of a run is made of its verified checkpoint, which the origin names."""
    if (source / "config.json").is_file() or not (source / "config.toml").is_file():
        yield source, origin
        return
    from phalanx.checkpoint import manifest_digest, step_directory
    from phalanx.governance.release import require_release
    from phalanx.train import PastRun, export_run

    require_release(source, certificate)
    with tempfile.TemporaryDirectory(prefix="phalanx-export-") as scratch:
        model = Path(scratch) / "model"
        past = PastRun(source, certificate)
        step = export_run(past, model, merge=past.config.model.adapter is not None)
        checkpoint = manifest_digest(past.checkpoints / step_directory(step))
        yield model, replace(origin, run=past.run_id, step=step, checkpoint=checkpoint)
