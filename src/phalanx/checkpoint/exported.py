"""An exported directory compared with the digest that its run signed at the end."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from phalanx.errors import CheckpointError, VerificationError
from phalanx.models import ModelSource, parameter_names, weights_digest
from phalanx.transport.tensors import UNREADABLE
from phalanx.verifier.forms import RefusedError, UnreadableError
from phalanx.verifier.statement import list_weight_files

_ADAPTER = "adapter_model.safetensors"
_PEFT = "base_model.model."


def verify_export(directory: Path, final_digest: str | None, *, trains_adapter: bool) -> str:
    """Return the digest of a directory's weights, which is the run's.

    Args:
        directory: Export to check; nothing in it is trusted.
        final_digest: Digest of the trained weights, from the run's signed log; None while it has not ended.

    Raises:
        CheckpointError: The run has not ended, or the directory holds other tensors than the run trained.
        VerificationError: The weights differ from the weights at the run's end, or another program may find others in
            the directory.
    """
    if final_digest is None:
        raise CheckpointError("the run's log has no digest of final weights: it has not ended; export prints its step")
    is_adapter = (directory / _ADAPTER).is_file()
    if is_adapter != trains_adapter:
        what = "an adapter" if trains_adapter else "a whole model"
        raise CheckpointError(
            f"{directory}: the run trained {what}, but this is something else; a merged model differs from both: "
            "export without --merge to verify"
        )
    try:
        list_weight_files(directory)
    except (RefusedError, UnreadableError) as exc:
        raise VerificationError(f"{exc}") from exc
    digest = weights_digest(_adapter_tensors(directory / _ADAPTER)) if is_adapter else _digest_alone(directory)
    if digest != final_digest:
        raise VerificationError(
            f"{directory}: weights have digest {digest}; but the run ended with {final_digest}: they were changed, "
            "or belong to another step or run"
        )
    return digest


def _digest_alone(directory: Path) -> str:
    """Return the digest of a model's weights where its files hold nothing else.

    transformers loads tensors under several names, and others than this reader where a file has two of one.
    """
    source = ModelSource(directory)
    others = source.unused_tensors(parameter_names(source.hub_config))
    if others:
        raise VerificationError(f"{directory}: has tensors that are none of the model's: {', '.join(others)[:300]}")
    return _digest_source(source)


def digest_model(directory: Path) -> str:
    """Return the digest of a model directory's weights, as a run signs it at its end."""
    return _digest_source(ModelSource(directory))


def _digest_source(source: ModelSource) -> str:
    return weights_digest((name, source.read_tensor(name)) for name in parameter_names(source.hub_config))


def _adapter_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - a file is no mapping
                yield name.removeprefix(_PEFT), file.get_tensor(name).to(torch.float32)
    except (OSError, *UNREADABLE) as exc:
        raise CheckpointError(f"{path}: cannot be read as safetensors: {exc}") from exc
