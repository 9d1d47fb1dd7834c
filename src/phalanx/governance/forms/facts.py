"""Facts of a run, by the file that has them: signed, or bound to the final weights by the signed log."""

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from phalanx.checkpoint.manifest import list_checkpoints
from phalanx.config.text import parse_strict_json
from phalanx.errors import DataError, InputError
from phalanx.evaluate import read_result
from phalanx.governance.release import read_summary
from phalanx.models.directory import read_config
from phalanx.policy import Project, find_projects
from phalanx.security.audit import verify_log
from phalanx.serve import TextModel
from phalanx.train import PastRun, export_run
from phalanx.train.config import RunConfig
from phalanx.train.records.audit_trail import LOG_FILE
from phalanx.train.records.lineage import dataset_of
from phalanx.verifier.shards import read_manifest

_FLOP = 6
"""Floating-point operations for each parameter and token of a dense model, forward and backward."""


def learning_type(run: RunConfig) -> str:
    """Return how a model learns, in the words of CycloneDX."""
    if run.data.prompts:
        return "reinforcement-learning"
    return "self-supervised" if run.data.labelled is None and run.data.preferences is None else "supervised"


def read_documents(past: PastRun, evaluations: Sequence[Path] = (), redteam: Path | None = None) -> dict[str, Any]:
    """Return the facts of a run; a file that is missing has no entry, and figures of other weights count for nothing.

    Args:
        evaluations: Results of ``phalanx eval --out``; none: ``evaluation*.json`` of the run.
        redteam: Report of ``phalanx redteam``; None: that of the run.

    Raises:
        AuditLogError: The log does not hold.
        PolicyError: The summary speaks of other weights than the log.
    """
    log = verify_log(past.path / LOG_FILE, past.owner, run=past.run_id)
    documents: dict[str, Any] = {
        "config.toml": past.config.model_dump(mode="json"),
        "derived": {
            "engine": type(past.config).engine,
            "learning_type": learning_type(past.config),
            "name": past.path.resolve().name,
        },
        "events.jsonl": {
            "run": past.run_id,
            "owner": past.owner.public_key.hex(),
            "first_time": log.first_time,
            "last_time": log.last_time,
            "events": log.num_events,
            "kinds": log.kinds,
            "final_weights_digest": past.final_weights_digest,
            "policy": sorted(past.policies),
        },
    }
    if (past.path / "summary.json").is_file() and past.final_weights_digest is not None:
        documents["summary.json"] = _finite(read_summary(past))
    documents |= _read_dataset(past)
    documents |= _read_model(past, evaluations, redteam)
    flop = _estimate_flop(documents)
    documents["derived"] |= {} if flop is None else {"flop_estimate": flop, "exceeds_1e23_flop": flop > 1e23}
    homes = find_projects((past.path,))
    if homes:
        people = Project.open(homes[0]).roles.people
        documents["roles.json"] = {"people": [{"name": n, "roles": list(p.roles)} for n, p in sorted(people.items())]}
    return documents


def _read_dataset(past: PastRun) -> dict[str, Any]:
    try:
        path, _ = dataset_of(past)
        manifest = read_manifest((path / "dataset.json").read_bytes())
    except (DataError, OSError):
        return {}
    body = manifest.body
    total = body["tokens"]
    sources = [{**source, "share": source["tokens"] / total if total else 0.0} for source in body["sources"]]
    names = ("documents", "tokens", "tokenizer", "recipe", "tools", "parents", "seal")
    facts = {name: body.get(name) for name in names}
    licences = sorted({str(source["licence"]) for source in sources if source["licence"]})
    counts = {"sources": sources, "licences": licences, "signer": manifest.signer, "digest": manifest.digest}
    counts["consents"] = [row for row in sources if row["consent"]]
    return {"dataset.json": {**facts, **counts}}


def _estimate_flop(documents: Mapping[str, Any]) -> float | None:
    """Return 6 x parameters x tokens; None where that is no estimate: of adapters, of experts, of a run without end."""
    config, model = documents.get("model/config.json", {}), documents["config.toml"]["model"]
    parameters = documents.get("checkpoints", {}).get("parameters")
    tokens = documents.get("summary.json", {}).get("tokens")
    if (
        parameters is None
        or not isinstance(tokens, int)
        or model.get("adapter")
        or any("experts" in key for key in config)
    ):
        return None
    return float(_FLOP * parameters * tokens)


def _read_model(past: PastRun, evaluations: Sequence[Path], redteam: Path | None) -> dict[str, Any]:
    if not list_checkpoints(past.checkpoints) or not past.certified_steps:
        return {}
    is_adapter = past.config.model.adapter is not None
    with tempfile.TemporaryDirectory(prefix="phalanx-forms-") as scratch:
        directory = Path(scratch) / "model"
        step = export_run(past, directory, merge=is_adapter)
        config = read_config(directory)
        parameters = sum(_count_parameters(file) for file in sorted(directory.glob("*.safetensors")))
        digest = TextModel(directory).model_digest
    documents: dict[str, Any] = {
        "model/config.json": dict(config),
        "checkpoints": {"parameters": parameters, "step": step, "model_digest": digest},
    }
    figures: dict[str, float] = {}
    for result in map(read_result, [*evaluations] or sorted(past.path.glob("evaluation*.json"))):
        if result.model.get("model_digest") == digest:
            figures |= {name: figure.value for name, figure in result.figures.items() if figure.value is not None}
    if figures:
        documents["evaluation.json"] = {"figures": figures}
    report = _read_redteam(redteam or past.path / "redteam" / "redteam.json", required=redteam is not None)
    if report.get("model_digest") == digest:
        rows = {str(row["attack"]): row for row in report["findings"]}
        documents["redteam/redteam.json"] = {"findings": [_finite(row) for row in rows.values()], **_finite(rows)}
    return documents


def _count_parameters(file: Path) -> int:
    with safe_open(file, framework="pt") as tensors:
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118


def _read_redteam(path: Path, *, required: bool) -> dict[str, Any]:
    if not required and not path.is_file():
        return {}
    try:
        report = parse_strict_json(path.read_bytes())
        [row["attack"] for row in report["findings"]]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise InputError(f"{path}: is no report of phalanx redteam ({exc})") from exc
    return dict(report)


def _finite(value: Any) -> Any:
    """Return JSON data without numbers that are not finite: a form shows no NaN as a figure."""
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
