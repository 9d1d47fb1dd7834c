"""A model's directory as it lies on the disk, looked at without torch."""

import contextlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from phalanx.errors import CheckpointError, ModelError
from phalanx.models.config import ModelConfig
from phalanx.models.config_keys import check_keys
from phalanx.planner.model.config_keys import MAX_LAYERS
from phalanx.planner.model.families import FAMILIES

WEIGHTS, WEIGHTS_INDEX, TOKENIZER = "model.safetensors", "model.safetensors.index.json", "tokenizer.json"
SLOW_BPE = ("vocab.json", "merges.txt")
"""Of which a tokenizer.json is made where there is none."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_MAX_HEADER_BYTES = 100_000_000
"""What the safetensors library takes at most."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def check_model(config: ModelConfig, *, needs_tokenizer: bool) -> None:
    """Refuse a model directory that lacks files that the run will read.

    Args:
        needs_tokenizer: Whether the text is cut by the model's own tokenizer.
    """
    described = describe_model(config)
    if described is not None:
        check_family(described, "model.architecture" if config.path is None else f"{config.path}/config.json")
    if config.path is None:
        if described is not None:
            check_keys(described, "model.architecture")
        if needs_tokenizer and config.architecture is not None:
            raise ModelError(
                'data.tokenizer.kind = "model": model.architecture comes without a tokenizer; use kind = "bpe", which '
                'trains one on the text, or kind = "file"'
            )
        return
    directory = model_directory(config.path)
    if needs_tokenizer and not any(
        all((directory / name).is_file() for name in names) for names in ((TOKENIZER,), SLOW_BPE)
    ):
        raise ModelError(
            f'{directory / TOKENIZER}: is missing, and data.tokenizer.kind = "model" reads it; nor are vocab.json and '
            "merges.txt there to make one from; `phalanx model import DIR OUT` makes one of other tokenizer files, or "
            'name one by kind = "file"'
        ).with_facts(
            code="PHX-I037",
            file=str(directory / TOKENIZER),
            key="data.tokenizer.kind",
            found="no such file",
            expected=TOKENIZER,
            do="phalanx model import DIR OUT",
        )
    if not config.from_scratch:
        check_weights(directory)
        for file in sorted(directory.glob("*.safetensors")):
            check_header(file)


def describe_model(config: ModelConfig) -> Mapping[str, Any] | None:
    """Return the keys of a model's config.json; None of a packaged model, which has been looked at before."""
    if config.path is None:
        return config.architecture
    return read_config(model_directory(config.path))


def check_family(described: Mapping[str, Any], where: str) -> None:
    """Refuse a model that no rule cuts into stages, or that claims more layers than anybody builds."""
    check_counts(described, where)
    model_type = described.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        experts = any("expert" in key for key in described)
        why = ", a mixture of experts, which stages do not carry" if experts else ""
        raise ModelError(
            f"{where}: model_type: found {model_type!r}{why}; expected one of {', '.join(sorted(FAMILIES))}"
        ).with_facts(
            code="PHX-I033",
            file=where,
            key="model_type",
            found=str(model_type),
            expected=", ".join(sorted(FAMILIES)),
        )


def check_header(path: Path) -> None:
    """Refuse a file that cannot be safetensors: its header and its length are compared, no tensor is read."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= min(size - 8, _MAX_HEADER_BYTES) else b""
    try:
        ends = [value["data_offsets"][1] for name, value in json.loads(header).items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
        problem = "" if size == expected else f"has {size} bytes, its header says {expected}"
    except (ValueError, RecursionError, AttributeError, LookupError, TypeError):
        problem = "its header is cut or malformed"
    if problem:
        raise ModelError(f"{path}: cannot be read as safetensors: {problem}; fetch or export it again").with_facts(
            code="PHX-I035",
            file=str(path),
            key="model.path",
            found=problem,
            expected="safetensors",
            do="fetch or export it again",
        )


def check_counts(described: Mapping[str, Any], where: str) -> None:
    """Refuse more layers or labels than anybody builds: transformers makes these one by one, before any weight."""
    for key, value in described.items():
        if isinstance(value, Mapping):
            check_counts(value, f"{where}: {key}")
        if ("layer" in key or key == "num_labels") and type(value) is int and value > MAX_LAYERS:
            raise ModelError(f"{where}: {key}: found {value!r:.40}; expected {MAX_LAYERS} at most")


def model_directory(path: str, key: str = "model.path") -> Path:
    """Return the directory of a model.

    Raises:
        ModelError: There is none; where the text could name a model of the hub, how to fetch it.
    """
    directory = Path(path)
    if directory.is_dir():
        return directory
    if directory.exists():
        raise ModelError(f"{key}: {path}: is a file; give the directory that it lies in").with_facts(
            code="PHX-I031", file=path, key=key, do="give the directory that it lies in"
        )
    fetch = ""
    if _HUB_NAME.fullmatch(path):
        beside = f"models/{path.rpartition('/')[2]}"
        fetch = (
            f"; if a model of the hub is meant, fetch it first, for nothing is fetched in a run: `hf download {path} "
            f"--local-dir {beside}`, then set {key} to {beside}"
        )
    raise ModelError(f"{key}: {path}: is no directory; give one in the hub's layout{fetch}").with_facts(
        code="PHX-I031",
        file=path,
        key=key,
        found="no directory",
        expected="a directory in the hub's layout",
        do="give a directory in the hub's layout",
    )


def read_config(directory: Path) -> dict[str, Any]:
    """Read a directory's config.json, and refuse counts that `check_counts` does."""
    path = directory / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ModelError(
            f"{path}: cannot be read ({exc.strerror}); expected a directory in the hub's layout: "
            "config.json, *.safetensors, tokenizer.json"
        ).with_facts(
            code="PHX-I032",
            file=str(path),
            key="model.path",
            found=exc.strerror or "",
            expected="a directory in the hub's layout",
        ) from exc
    except (ValueError, RecursionError) as exc:
        raise ModelError(f"{path}: is not valid JSON: {exc}; correct it, or fetch the model again").with_facts(
            code="PHX-I032",
            file=str(path),
            key="model.path",
            found=str(exc),
            expected="JSON",
            do="correct it, or fetch the model again",
        ) from exc
    if not isinstance(data, dict):
        raise ModelError(f"{path}: found a {type(data).__name__}; expected an object")
    check_counts(data, str(path))
    return data


def check_weights(directory: Path) -> None:
    """Refuse a directory without safetensors."""
    if (directory / WEIGHTS).is_file() or (directory / WEIGHTS_INDEX).is_file():
        return
    pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
    if pickles:
        raise ModelError(
            f"{directory / pickles[0]}: pickled weights can run code and are refused; `phalanx model convert DIR OUT` "
            "makes safetensors of them"
        ).with_facts(
            code="PHX-I034",
            file=str(directory / pickles[0]),
            key="model.path",
            found="pickled weights",
            expected="safetensors",
            do="phalanx model convert DIR OUT",
        )
    raise ModelError(
        f"{directory}: no {WEIGHTS} and no {WEIGHTS_INDEX}; expected the weights in one of them"
    ).with_facts(code="PHX-I035", file=str(directory))


def refuse_existing(out: Path) -> None:
    """Return where nothing has the name of a directory that is to be written."""
    if out.exists():
        raise CheckpointError(f"{out}: already exists and is not overwritten; choose another path").with_facts(
            code="PHX-I056", file=str(out), do="choose another path"
        )


@contextlib.contextmanager
def spare_directory(out: Path) -> Iterator[Path]:
    """Yield an empty directory beside `out`, which `publish_model` renames; it is removed where nobody has."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        spare = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=out.parent))
        try:
            yield spare
        finally:
            shutil.rmtree(spare, ignore_errors=True)
    except OSError as exc:
        raise CheckpointError(f"{out}: cannot be written ({exc.strerror})") from exc


def publish_model(spare: Path, out: Path) -> None:
    """Give a directory its name, and modes that a server under another user needs; safetensors writes 0600."""
    spare.chmod(0o755)
    for path in spare.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    spare.rename(out)
