"""A CycloneDX 1.7 bill of materials of a model: its card, its figures, and the composition of its data."""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.governance.statements import MeasuredTests, ModelFiles
from phalanx.verifier.passport import list_sources
from phalanx.verifier.shards import SignedManifest

_DATASET = "dataset"


def make_bill(
    files: ModelFiles,
    architecture: Mapping[str, Any],
    approach: str,
    manifest: SignedManifest | None,
    tests: Sequence[MeasuredTests],
    parts: Mapping[str, str],
) -> bytes:
    """Return the bill as JSON; equal inputs give equal bytes.

    Args:
        architecture: Keys of the model's config; `model_type` and `architectures` are used.
        approach: A learning type of CycloneDX, such as ``self-supervised``.
        parts: Versions of the programs that the model was made with.
    """
    sources = [] if manifest is None else [_describe_source(n, row) for n, row in enumerate(list_sources(manifest))]
    data = [] if manifest is None else [_describe_dataset(manifest), *sources]
    programs = [
        {"type": "library", "bom-ref": f"program:{name}", "name": name, "version": version}
        for name, version in sorted(parts.items())
    ]
    model = {
        "type": "machine-learning-model",
        "bom-ref": "model",
        "name": files.name,
        "hashes": [{"alg": "SHA-256", "content": files.root}],
        "modelCard": _describe_model(architecture, approach, [*data[:1]], tests),
    }
    bill = {
        "$schema": "http://cyclonedx.org/schema/bom-1.7.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.7",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, files.root)}",
        "version": 1,
        "metadata": {"component": model},
        "components": [*data, *programs],
        "dependencies": [
            {"ref": "model", "dependsOn": [part["bom-ref"] for part in (*data[:1], *programs)]},
            *({"ref": part["bom-ref"], "dependsOn": [row["bom-ref"] for row in sources]} for part in data[:1]),
        ],
        "compositions": [{"aggregate": "complete", "assemblies": [_DATASET]}] if data else [],
    }
    return json.dumps(bill, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _describe_model(
    architecture: Mapping[str, Any], approach: str, data: Sequence[Mapping[str, Any]], tests: Sequence[MeasuredTests]
) -> dict[str, Any]:
    parameters: dict[str, Any] = {
        "approach": {"type": approach},
        "architectureFamily": str(architecture.get("model_type", "")),
        "modelArchitecture": ", ".join(map(str, architecture.get("architectures") or ())),
        "datasets": [{"ref": part["bom-ref"]} for part in data],
    }
    metrics = [
        {"type": f"{result.name}: {name}", "value": value}
        for result in tests
        for name, value in sorted(result.figures.items())
    ]
    return {"modelParameters": parameters, "quantitativeAnalysis": {"performanceMetrics": metrics}}


def _describe_dataset(manifest: SignedManifest) -> dict[str, Any]:
    body = manifest.body
    counts = {"documents": str(body["documents"]), "tokens": str(body["tokens"]), "signer": manifest.signer}
    return {
        "type": "data",
        "bom-ref": _DATASET,
        "name": "training data",
        "hashes": [{"alg": "SHA-256", "content": manifest.digest}],
        "data": [{"type": "dataset", "name": "training data"}],
        "properties": _properties(counts),
    }


def _describe_source(number: int, row: tuple[str, str, str, str, str]) -> dict[str, Any]:
    name, licence, documents, tokens, share = row
    counts = {"source": str(number), "documents": documents, "tokens": tokens, "share": share}
    described: dict[str, Any] = {"type": "data", "bom-ref": f"source:{number}", "name": name}
    if licence:
        described["licenses"] = [{"license": {"name": licence}}]
    return {**described, "data": [{"type": "dataset", "name": name}], "properties": _properties(counts)}


def _properties(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": f"phalanx:{name}", "value": value} for name, value in values.items()]
