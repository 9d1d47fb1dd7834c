"""A verdict with everything that it rests on, as files that others can check."""

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from phalanx.pipeline.messages import Signed
from phalanx.pipeline.verdict import Verdict


@dataclass
class Exhibit:
    """Tensors and digests that a referee looked at."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    weights: str = ""


def write_evidence(
    directory: Path,
    verdict: Verdict,
    exhibit: Exhibit,
    headers: Mapping[str, Signed],
    certificates: Mapping[str, str],
) -> Path:
    """Write one verdict as ``NAME.json`` with its tensors in ``NAME.safetensors`` beside it.

    Args:
        directory: Where evidence is kept.
        verdict: Who is guilty of what.
        exhibit: The tensors that were compared.
        headers: What the parties signed, by what it is.
        certificates: PEM of the parties, whose keys the signatures are checked with.

    Returns:
        The path of the JSON file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    name = f"step-{verdict.step:08d}-stage-{verdict.stage}-{verdict.party}"
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in exhibit.tensors.items()}
    blob = save(tensors)
    (directory / f"{name}.safetensors").write_bytes(blob)
    record = {
        "verdict": verdict.model_dump(mode="json"),
        "weights_digest": exhibit.weights,
        "headers": {key: signed.model_dump() for key, signed in headers.items()},
        "certificates": {key: base64.b64encode(pem.encode()).decode() for key, pem in certificates.items()},
        "tensors": {"file": f"{name}.safetensors", "sha256": hashlib.sha256(blob).hexdigest()},
    }
    path = directory / f"{name}.json"
    path.write_text(json.dumps(record, indent=1, sort_keys=True), encoding="utf-8")
    return path
