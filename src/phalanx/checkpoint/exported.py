"""An exported directory compared with the end of its run: tensors, config, tokenizer and what lies beside them."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from phalanx.config.text import parse_strict_json
from phalanx.errors import CheckpointError, VerificationError
from phalanx.models import ModelSource, parameter_names, weights_digest
from phalanx.models.directory import WEIGHTS_INDEX
from phalanx.transport.tensors import UNREADABLE
from phalanx.verifier.forms import RefusedError, UnreadableError
from phalanx.verifier.statement import SIGNATURE_FILE, list_weight_files

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_UNREAD_KINDS = ("", ".md")
"""Endings of files that no program loads with a model: its card, its licence."""


def verify_export(
    directory: Path, final_digest: str | None, tensors: Mapping[str, Tensor] | None, file: str = ADAPTER_WEIGHTS
) -> str:
    """Return the digest that the run signed at its end, of a directory with its weights.

    Args:
        directory: Export to check; nothing in it is trusted.
        final_digest: Digest of all weights, from the run's signed log; None while it has not ended.
        tensors: Tensors of the run's last certified checkpoint, as `file` has them; None of a whole model whose names
            the signed digest is over: it is over adapter and base together, and has other names than a classifier.

    Raises:
        CheckpointError: The run has not ended, or the directory holds other tensors than the run trained.
        VerificationError: The weights differ from those at the run's end, or another program may find others in the
            directory.
    """
    if final_digest is None:
        raise CheckpointError("the run's log has no digest of final weights: it has not ended; export prints its step")
    is_adapter = tensors is not None and file == ADAPTER_WEIGHTS
    if is_adapter != (directory / ADAPTER_WEIGHTS).is_file():
        expected = "an adapter" if is_adapter else "a whole model"
        raise CheckpointError(
            f"{directory}: expected {expected}, which the run trained, and found something else; "
            "export the run again, without --merge, to compare"
        )
    try:
        list_weight_files(directory)
    except (RefusedError, UnreadableError) as exc:
        raise VerificationError(f"{exc}") from exc
    if tensors is None:
        digest, signed = _digest_alone(directory), final_digest
    else:
        digest = weights_digest(read_tensors(directory / file))
        signed = weights_digest(tensors.items())
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


def compare_companions(directory: Path, expected: Path) -> None:
    """Compare what lies beside the tensors: with another config, tokenizer or chat template they are another model.

    Args:
        expected: Directory with the files that an export of the run has beside its tensors.

    Raises:
        VerificationError: A file was changed, added or taken away.
    """
    homes = directory, expected
    for name in sorted({path.relative_to(home).as_posix() for home in homes for path in home.rglob("*")}):
        path, own = directory / name, expected / name
        if own.is_file() and path.is_file():
            if path.read_bytes() != own.read_bytes():
                _compare_keys(path, own)
        elif own.is_file():
            raise VerificationError(f"{path}: is missing; an export of the run has it")
        elif not (path.is_dir() or is_unread(path)):
            raise VerificationError(f"{path}: no export of the run has it, and programs may load it; remove it")


def is_unread(path: Path) -> bool:
    """Whether a file is not loaded with a model, or is compared as a file of its weights."""
    is_weights = path.suffix == ".safetensors" or path.name in (WEIGHTS_INDEX, SIGNATURE_FILE)
    return is_weights or path.suffix in _UNREAD_KINDS


def _compare_keys(path: Path, expected: Path) -> None:
    """Accept the same keys and values in another layout; name the first that differs."""
    try:
        value, own = (parse_strict_json(file.read_bytes()) for file in (path, expected))
    except (ValueError, RecursionError) as exc:
        raise VerificationError(f"{path}: was changed: an export of the run has other bytes") from exc
    for key in sorted(own.keys() | value.keys()) if isinstance(own, dict) and isinstance(value, dict) else []:
        if key not in value or key not in own or value[key] != own[key]:
            raise VerificationError(f"{path}: {key}: found {value.get(key)!r:.60}, expected {own.get(key)!r:.60}")
    if value != own:
        raise VerificationError(f"{path}: was changed: an export of the run has other values")


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file of weights by name.

    Raises:
        CheckpointError: The file is missing or malformed.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - a file is no mapping
                yield name, file.get_tensor(name)
    except (OSError, *UNREADABLE) as exc:
        raise CheckpointError(f"{path}: cannot be read as safetensors: {exc}") from exc
