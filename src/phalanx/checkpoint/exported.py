"""An exported directory compared with the digest that its run signed at the end."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from phalanx.config.text import parse_strict_json
from phalanx.errors import CheckpointError, VerificationError
from phalanx.models import ModelSource, parameter_names, weights_digest
from phalanx.transport.tensors import UNREADABLE
from phalanx.verifier.forms import RefusedError, UnreadableError
from phalanx.verifier.statement import list_weight_files

_ADAPTER, _ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"


def verify_export(
    directory: Path,
    final_digest: str | None,
    read_adapter: Callable[[], tuple[Mapping[str, Any], Mapping[str, Tensor]]] | None,
) -> str:
    """Return the digest that the run signed at its end, of a directory with its weights.

    Args:
        directory: Export to check; nothing in it is trusted.
        final_digest: Digest of all weights, from the run's signed log; None while it has not ended.
        read_adapter: Reads config and tensors of the run's last certified checkpoint, as peft's files have them; None
            where the run trained a whole model. The signed digest is over adapter and base together.

    Raises:
        CheckpointError: The run has not ended, or the directory holds other tensors than the run trained.
        VerificationError: The weights, or the config of an adapter, differ from those at the run's end, or another
            program may find others in the directory.
    """
    if final_digest is None:
        raise CheckpointError("the run's log has no digest of final weights: it has not ended; export prints its step")
    is_adapter = (directory / _ADAPTER).is_file()
    if is_adapter != (read_adapter is not None):
        expected = "an adapter" if read_adapter is not None else "a whole model"
        raise CheckpointError(
            f"{directory}: expected {expected}, which the run trained, and found something else; "
            "export the run again, without --merge, to compare"
        )
    try:
        list_weight_files(directory)
    except (RefusedError, UnreadableError) as exc:
        raise VerificationError(f"{exc}") from exc
    if read_adapter is None:
        digest, signed = _digest_alone(directory), final_digest
    else:
        config, tensors = read_adapter()
        _check_adapter_config(directory / _ADAPTER_CONFIG, config)
        digest, signed = weights_digest(read_adapter_tensors(directory / _ADAPTER)), weights_digest(tensors.items())
    if digest != signed:
        raise VerificationError(
            f"{directory}: weights have digest {digest}; but the run ended with {signed}: they were changed, "
            "or belong to another step or run"
        )
    return final_digest


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


def _check_adapter_config(path: Path, expected: Mapping[str, Any]) -> None:
    """Refuse another scale, rank or place of an adapter's tensors: with these they are another model."""
    try:
        config = parse_strict_json(path.read_bytes())
    except (OSError, ValueError, RecursionError) as exc:
        raise CheckpointError(f"{path}: cannot be read as JSON: {exc!s:.200}") from exc
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: found a {type(config).__name__}; expected an object")
    for key in sorted(expected.keys() | config.keys()):
        if key not in config or key not in expected or config[key] != expected[key]:
            raise VerificationError(f"{path}: {key}: found {config.get(key)!r:.60}, expected {expected.get(key)!r:.60}")


def read_adapter_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an adapter's file by name.

    Raises:
        CheckpointError: The file is missing or malformed.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - a file is no mapping
                yield name, file.get_tensor(name)
    except (OSError, *UNREADABLE) as exc:
        raise CheckpointError(f"{path}: cannot be read as safetensors: {exc}") from exc
