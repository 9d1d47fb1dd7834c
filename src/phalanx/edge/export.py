"""Export of a model for llama.cpp or onnxruntime; the exported file is checked before it appears."""

import hashlib
import importlib.util
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.align.safety import safety_prompts
from phalanx.child import PythonProcess
from phalanx.data.chat import model_template
from phalanx.edge.comparison import (
    REFUSED,
    CheckSizes,
    Comparison,
    Difference,
    judge_pile,
    name_missing_checks,
)
from phalanx.edge.gguf_file import GGUF_PRECISIONS, write_gguf
from phalanx.edge.rounding import find_pile
from phalanx.edge.runtimes import RUNTIME_PACKAGES, IndependentRuntime, OwnRuntime
from phalanx.errors import ConfigError, ModelError
from phalanx.models.directory import publish_model, read_config, refuse_existing, spare_directory
from phalanx.models.hub_files import architecture_of

PRECISIONS = {"gguf": GGUF_PRECISIONS, "onnx": ("fp32", "fp16", "int8", "int4")}
TABLE_FILE = "differences.json"
GGUF_FILE = "model.gguf"
NOT_CHECKED = "not checked by an independent runtime"
_ONNX_BUILDER = "onnxruntime_genai.models.builder"
_ONNX_TIMEOUT_S = 3600.0
_ONNX_BLOCK = 32


@dataclass(frozen=True)
class EdgeExport:
    """What an export came to.

    Attributes:
        directory: Directory of the exported files; None where the table refused them.
        state: ``checked``, ``refused`` or `NOT_CHECKED`.
        runtime: Name and version of the independent runtime; None where there was none.
        files: SHA-256 of each exported file.
    """

    directory: Path | None
    state: str
    runtime: str | None
    rows: list[Difference]
    files: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return what ``differences.json`` holds."""
        return {
            "state": self.state,
            "runtime": self.runtime,
            "differences": [row.to_json() for row in self.rows],
            "files": self.files,
        }


def export_edge(
    directory: Path,
    out: Path,
    kind: str,
    precision: str,
    *,
    sizes: CheckSizes | None,
    prompts: Path | None = None,
) -> EdgeExport:
    """Export a model directory; the new directory appears in one go, and only where no check refuses it.

    Args:
        directory: Hub layout, with a tokenizer.json.
        kind: ``gguf`` or ``onnx``.
        precision: One of `PRECISIONS`.
        sizes: Sizes of the comparison; None compares nothing, and the result says so.
        prompts: JSON lines of harmful and harmless prompts; None takes the prompts of this package.

    Raises:
        CheckpointError: `out` exists or cannot be written.
        ConfigError: The format has no such precision.
        ModelError: The model has no form in this format, or the runtime cannot open what was written.
    """
    if precision not in PRECISIONS.get(kind, ()):
        choices = "; ".join(f"{name}: {', '.join(values)}" for name, values in PRECISIONS.items())
        raise ConfigError(f"--format {kind} --precision {precision}: no such export; choices: {choices}")
    refuse_existing(out)
    with spare_directory(out) as spare:
        if kind == "gguf":
            write_gguf(directory, spare / GGUF_FILE, precision)
        else:
            write_onnx(directory, spare, precision)
        files = {path.name: _digest(path) for path in sorted(spare.iterdir())}
        version, rows = None, list[Difference]()
        if sizes is not None:
            version, rows = _judge_files(directory, spare, kind, precision, sizes=sizes, prompts=prompts)
        if any(row.verdict == REFUSED for row in rows):
            return EdgeExport(None, "refused", version, rows, {})
        export = EdgeExport(out, NOT_CHECKED if version is None else "checked", version, rows, files)
        table = {"format": kind, "precision": precision, **export.to_json()}
        (spare / TABLE_FILE).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
        publish_model(spare, out)
        return export


def write_onnx(directory: Path, out: Path, precision: str) -> None:
    """Write graph, weights, tokenizer, template and settings; matrices are 8 or 4 bits in blocks of 32 where asked for.

    The builder runs in a process of its own, without network.

    Raises:
        ModelError: The builder is missing, or does not know the family; its last words are in the text.
    """
    if any(importlib.util.find_spec(name) is None for name in ("onnxruntime_genai", "onnx_ir")):
        raise ModelError(
            "--format onnx: needs onnxruntime-genai and onnx-ir, of which one is not installed; install "
            "phalanx-train[onnx]"
        )
    config = read_config(directory)
    if not config.get("architectures"):
        raise ModelError(
            f"{directory / 'config.json'}: architectures: missing, and the builder goes by it; add "
            f'"architectures": ["{architecture_of(str(config.get("model_type")))}"]'
        )
    with tempfile.TemporaryDirectory(prefix="phalanx-onnx-") as scratch:
        log = Path(scratch) / "builder.log"
        command = [
            _ONNX_BUILDER,
            "-i",
            str(directory.resolve()),
            "-o",
            str(out.resolve()),
            "-p",
            precision,
            "-e",
            "cpu",
        ]
        command += ["-c", scratch, "--extra_options", "hf_token=false"]
        if precision in ("int4", "int8"):
            command += [f"block_size={_ONNX_BLOCK}"]
        process = PythonProcess(command, {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}, log)
        try:
            code = process.wait(_ONNX_TIMEOUT_S)
        finally:
            process.kill()
        if code != 0 or not (out / "model.onnx").is_file():
            raise ModelError(f"{directory}: onnxruntime-genai's builder makes no ONNX of it: {process.last_output()}")
    template = model_template(directory)
    if template is not None:
        # transformers leaves out one that is in none of the files that it looks for
        (out / "chat_template.jinja").write_text(template.source, encoding="utf-8")
    # transformers may write another spelling of the same tokenizer; the file that was trained with is the one
    shutil.copyfile(directory / "tokenizer.json", out / "tokenizer.json")


def _judge_files(
    directory: Path, spare: Path, kind: str, precision: str, *, sizes: CheckSizes, prompts: Path | None
) -> tuple[str | None, list[Difference]]:
    """Compare what lies in `spare` with the model; return the runtime's version, where there is one, and the table."""
    rows = judge_pile(find_pile(directory, precision))
    package = RUNTIME_PACKAGES[kind]
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        return None, [*rows, *name_missing_checks(package, kind)]
    model, asked = OwnRuntime(directory), safety_prompts(prompts)
    other = IndependentRuntime(kind, spare / GGUF_FILE if kind == "gguf" else spare)
    try:
        comparison = Comparison(model, other, precision, sizes, asked, is_gguf=kind == "gguf")
        return other.version, [*rows, *comparison.list_differences()]
    finally:
        other.close()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
