"""Export of a model for llama.cpp or onnxruntime; the exported file is checked before it appears."""

import importlib.util
import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.align.safety import safety_prompts
from phalanx.edge.comparison import (
    REFUSED,
    CheckSizes,
    Comparison,
    Difference,
    judge_direction,
    judge_pile,
    name_missing_checks,
)
from phalanx.edge.gguf_file import GGUF_PRECISIONS, describe_gguf, write_gguf
from phalanx.edge.onnx_folder import ONNX_PRECISIONS, describe_onnx, write_onnx
from phalanx.edge.rounding import find_direction, find_pile
from phalanx.edge.runtimes import RUNTIME_PACKAGES, IndependentRuntime, OwnRuntime
from phalanx.edge.statement import (
    ExportFacts,
    ExportOrigin,
    ExportSource,
    digest_file,
    software_version,
    write_statement,
)
from phalanx.errors import CheckpointError, ConfigError
from phalanx.models import ModelSource, parameter_names

PRECISIONS = {"gguf": GGUF_PRECISIONS, "onnx": ONNX_PRECISIONS}
TABLE_FILE = "differences.json"
GGUF_FILE = "model.gguf"
CHECKED, NOT_CHECKED = "checked", "not checked by an independent runtime"


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
    origin: ExportOrigin | None = None,
) -> EdgeExport:
    """Export a model directory; the new directory appears in one go, and only where no check refuses it.

    Args:
        directory: Hub layout, with a tokenizer.json.
        kind: ``gguf`` or ``onnx``.
        precision: One of `PRECISIONS`.
        sizes: Sizes of the comparison; None compares nothing, and the result says so.
        origin: Who signs a statement beside the files; None writes none.

    Raises:
        CheckpointError: `out` exists or cannot be written.
        ModelError: The model has no form in this format, or the runtime cannot open what was written.
    """
    if precision not in PRECISIONS.get(kind, ()):
        choices = "; ".join(f"{name}: {', '.join(values)}" for name, values in PRECISIONS.items())
        raise ConfigError(f"--format {kind} --precision {precision}: no such export; choices: {choices}")
    if out.exists():
        raise CheckpointError(f"{out}: already exists and is not overwritten; choose another path").with_facts(
            code="PHX-I056", file=str(out), do="choose another path"
        )
    model = ModelSource(directory)
    # the builder of ONNX reads the files by itself, and the checks of rounding by this reader
    model.check_names(parameter_names(model.hub_config))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        spare = Path(tempfile.mkdtemp(prefix=".exporting-", dir=out.parent))
        try:
            source = None if origin is None else origin.describe_source(directory)
            if kind == "gguf":
                write_gguf(directory, spare / GGUF_FILE, precision)
            else:
                write_onnx(directory, spare, precision)
            files = {path.name: digest_file(path) for path in sorted(spare.iterdir())}
            version, rows = None, list[Difference]()
            if sizes is not None:
                version, rows = _judge_files(directory, spare, kind, precision, sizes)
            is_refused = any(row.verdict == REFUSED for row in rows)
            state = "refused" if is_refused else (NOT_CHECKED if version is None else CHECKED)
            export = EdgeExport(None if is_refused else out, state, version, rows, {} if is_refused else files)
            if not is_refused:
                table = {"format": kind, "precision": precision, **export.to_json()}
                (spare / TABLE_FILE).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
                if origin is not None and source is not None:
                    facts = _describe_export(export, kind, precision, source, sizes)
                    write_statement(spare, facts, origin.signer)
                _publish_files(spare, out)
            return export
        finally:
            shutil.rmtree(spare, ignore_errors=True)
    except OSError as exc:
        raise CheckpointError(f"{out}: cannot be written ({exc.strerror})") from exc


def _describe_export(
    export: EdgeExport, kind: str, precision: str, source: ExportSource, sizes: CheckSizes | None
) -> ExportFacts:
    compared = None
    if sizes is not None and export.state == CHECKED:
        compared = {key: value for key, value in asdict(sizes).items() if key != "prompts"}
    return ExportFacts(
        format=kind,
        precision=precision,
        quantiser=(describe_gguf if kind == "gguf" else describe_onnx)(precision),
        source=source,
        state=export.state,
        runtime=export.runtime,
        compared=compared,
        phalanx=software_version(),
    )


def _judge_files(
    directory: Path, spare: Path, kind: str, precision: str, sizes: CheckSizes
) -> tuple[str | None, list[Difference]]:
    """Compare what lies in `spare` with the model; return the runtime's version, where there is one, and the table."""
    rows = [*judge_pile(find_pile(directory, precision)), *judge_direction(find_direction(directory, precision))]
    package = RUNTIME_PACKAGES[kind]
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        return None, [*rows, *name_missing_checks(package, kind)]
    model, asked = OwnRuntime(directory), safety_prompts(sizes.prompts)
    other = IndependentRuntime(kind, spare / GGUF_FILE if kind == "gguf" else spare)
    try:
        comparison = Comparison(model, other, precision, sizes, asked, is_gguf=kind == "gguf")
        return other.version, [*rows, *comparison.list_differences()]
    finally:
        other.close()


def _publish_files(spare: Path, out: Path) -> None:
    """Give the directory its name, with modes that a server under another user needs."""
    spare.chmod(0o755)
    for path in spare.iterdir():
        path.chmod(0o644)
    spare.rename(out)
