"""Pickles, old tokenizers and GGUF files read in a sandbox: ``python -m phalanx.models.unpickle SOURCE OUT WHAT...``.

The child's side of `phalanx.models.imported`. It writes safetensors and tokenizer files to OUT, or says there why not.
"""

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from phalanx.errors import ModelError

SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
REFUSAL = "refusal.txt"
WEIGHTS, TOKENIZER, GGUF = "weights", "tokenizer", "gguf"
_GROWTH = {WEIGHTS: 2, TOKENIZER: 2, GGUF: 24}
"""Most bytes written for one that is read: of GGUF a float32 of each number of its most compressed kind, and names."""
_SPARE_BYTES, _ADDRESSES = 64 << 20, 64 << 30
_MAX_S = 3600


def pickled_files(directory: Path) -> list[Path]:
    """List the files of pickled weights, of one or of many parts; empty where there are none."""
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if not (directory / INDEX).is_file():
        return []
    try:
        names = set(json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise ModelError(f"{directory / INDEX}: is malformed; expected weight_map from names to files") from exc
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (directory / name).is_file():
            raise ModelError(f"{directory / INDEX}: names {name!r}; expected a file beside it")
    return [directory / name for name in sorted(names)]


def main(source: Path, out: Path, wanted: tuple[str, ...]) -> int:
    """Run the requested action, and return an exit code."""
    files = [path for path in source.iterdir() if path.is_file()] if source.is_dir() else [source]
    try:
        acts = [_action_function(what) for what in wanted]
        _limit_resources(sum(path.stat().st_size for path in files), max(_GROWTH[what] for what in wanted))
        for act in acts:
            act(source, out)
    except Exception as exc:  # noqa: BLE001 - whatever it is, the starter tells it
        (out / REFUSAL).write_text(f"{type(exc).__name__}: {exc}"[:2000], encoding="utf-8")
        return 3
    return 0


def _action_function(what: str) -> Callable[[Path, Path], None]:
    """Return the function of an action; only its imports enter the sandbox."""
    if what == TOKENIZER:
        from phalanx.models.hub_files import save_tokenizer  # noqa: PLC0415 - weights need no transformers

        return save_tokenizer
    if what == GGUF:
        from phalanx.models.gguf_reader import rewrite_gguf  # noqa: PLC0415 - weights need no transformers

        return rewrite_gguf
    return _rewrite_pickles


def _limit_resources(size: int, growth: int) -> None:
    """Bound time, memory and written bytes by the size of the files and their allowed growth."""
    bounds = {
        resource.RLIMIT_CPU: _MAX_S,
        resource.RLIMIT_AS: _ADDRESSES + 2 * growth * size,
        resource.RLIMIT_FSIZE: growth * size + _SPARE_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    for which, limit in bounds.items():
        resource.setrlimit(which, (limit, limit))


def _rewrite_pickles(source: Path, out: Path) -> None:
    files = pickled_files(source)
    index: dict[str, str] = {}
    for number, path in enumerate(files, 1):
        single = len(files) == 1
        name = "model.safetensors" if single else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = _named_tensors(torch.load(path, map_location="cpu", weights_only=True, mmap=True), path.name)
        save_file(tensors, out / name, {"format": "pt"})
        index |= dict.fromkeys(tensors, name)
    if len(files) > 1:
        text = json.dumps({"metadata": {}, "weight_map": index}, indent=1, sort_keys=True)
        (out / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _named_tensors(content: Any, where: str) -> dict[str, Tensor]:
    if not isinstance(content, dict):
        raise ModelError(f"{where}: holds a {type(content).__name__}; expected tensors by name")
    for name, value in content.items():
        if not isinstance(name, str) or type(value) not in (Tensor, torch.nn.Parameter):
            raise ModelError(f"{where}: {name!r} is a {type(value).__name__}; expected a tensor")
    # tied weights share memory in a pickle and have memory of their own in safetensors
    return {name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in content.items()}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), tuple(sys.argv[3:])))
