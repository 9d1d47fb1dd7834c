"""A directory of the hub made into one that can be trained: safetensors, a tokenizer.json, every shape looked at."""

import importlib.util
import re
import shutil
import stat
import tempfile
from pathlib import Path

import torch

from phalanx.errors import ModelError
from phalanx.models.build import parameter_shapes
from phalanx.models.directory import TOKENIZER, publish_model, refuse_existing, spare_directory
from phalanx.models.gguf_reader import SUFFIX
from phalanx.models.hub_files import GENERATION, tokenizer_companions
from phalanx.models.source import ModelSource, read_hub_config
from phalanx.models.unpickle import GGUF, INDEX, REFUSAL, WEIGHTS, pickled_files
from phalanx.models.unpickle import TOKENIZER as MAKE_TOKENIZER
from phalanx.security.isolation import Measure, Program, Sandbox, start_isolated

_MODULE = "phalanx.models.unpickle"
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$", re.ASCII)
_CLOSE_S, _MAX_S = 60.0, 3700.0
# nothing in a public model is secret
_NOT_NEEDED = (Measure.SECRET_MEMORY, Measure.NO_SWAP)


def import_model(source: Path, out: Path, *, makes_tokenizer: bool = True) -> None:
    """Write a new directory with a model's config, weights as safetensors, tokenizer and generation defaults.

    Pickled weights are read in a child process that reaches no network, program or file beside the directory, with
    torch's own reader of plain tensors; so are tokenizer files that are no tokenizer.json, and GGUF files.

    Args:
        source: A directory in the hub's layout, pickled weights allowed, or a GGUF file.
        out: New directory; it appears in one go, after every shape was compared with the config's.
        makes_tokenizer: Make a tokenizer.json where there is none and other files say how.

    Raises:
        CheckpointError: `out` exists or cannot be written.
        ModelError: The model is missing, malformed, of an unknown family, or its files are not its config's.
        IsolationError: This machine cannot close the sandbox; nothing was read.
    """
    refuse_existing(out)
    if source.suffix == SUFFIX:
        _check_gguf(source)
    else:
        read_hub_config(source)
    with spare_directory(out) as spare:
        _fill_directory(source, spare, makes_tokenizer)
        _check_copy(source, spare)
        publish_model(spare, out)


def _check_copy(source: Path, spare: Path) -> None:
    """Compare the written files with their config; an error names the user's file that they were made of."""
    try:
        check_shapes(ModelSource(spare))
    except ModelError as exc:
        names = _file_origins(source, spare)
        raise ModelError(_replace_paths(str(exc), names)).with_facts(
            **{fact: _replace_paths(value, names) for fact, value in exc.error_facts.items()}
        ) from exc


def _file_origins(source: Path, spare: Path) -> list[tuple[str, str]]:
    """List pairs of a written file and the user's file that it was made of."""
    if source.suffix == SUFFIX:
        return [(str(path), str(source)) for path in (*spare.iterdir(), spare)]
    pickles = [] if any(source.glob("*.safetensors")) else pickled_files(source)
    made = [(spare / "model.safetensors.index.json", source / INDEX)] if len(pickles) > 1 else []
    made += zip(sorted(spare.glob("*.safetensors")), pickles, strict=False)
    return [(str(path), str(origin)) for path, origin in (*made, (spare, source))]


def _replace_paths(text: str, names: list[tuple[str, str]]) -> str:
    for written, origin in names:
        text = text.replace(written, origin)
    return text


def check_shapes(source: ModelSource) -> None:
    """Compare the shape of every tensor that a run would read with the config's."""
    shapes = parameter_shapes(source.hub_config)
    source.check_shapes({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    if source.family.ties_head(source.hub_config):
        source.check_tied()


def _check_gguf(source: Path) -> None:
    """Refuse what cannot be read at all, before a child is started for it."""
    part = _PART.search(source.name)
    problem, do = "", ""
    if not source.is_file():
        problem, do = "is no file", "give the path of a .gguf file"
    elif part is not None and int(part[1]) > 1:
        problem, do = f"is one of {int(part[1])} parts", "join them with llama.cpp's gguf-split --merge"
    elif not all(map(importlib.util.find_spec, ("gguf", "accelerate"))):
        problem, do = "needs the packages gguf and accelerate", "install phalanx-train[gguf]"
    if problem:
        raise ModelError(f"{source}: {problem}; {do}").with_facts(
            code="PHX-I038", file=str(source), found=problem, do=do
        )


def _fill_directory(source: Path, target: Path, makes_tokenizer: bool) -> None:
    if source.suffix == SUFFIX:
        _run_confined(source, target, [GGUF])
        _open_to_all(target)
        return
    ready = sorted(source.glob("*.safetensors")) + sorted(source.glob("*.safetensors.index.json"))
    actions = [] if ready else [WEIGHTS]
    if actions and not pickled_files(source):
        raise ModelError(
            f"{source}: has neither safetensors nor pytorch_model.bin; expected weights of the hub's layout"
        )
    companions = list(tokenizer_companions(source))
    if makes_tokenizer and companions and not (source / TOKENIZER).is_file():
        actions.append(MAKE_TOKENIZER)
    if actions:
        _run_confined(source, target, actions)
    for path in (*ready, source / "config.json", source / GENERATION, source / TOKENIZER, *companions):
        place = target / path.relative_to(source)
        if path.is_file() and not place.exists():
            place.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, place)
    _open_to_all(target)


def _open_to_all(target: Path) -> None:
    for path in target.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _run_confined(source: Path, target: Path, wanted: list[str]) -> None:
    """Have the child fill a directory of its own, and take plain files with known names from it."""
    # the links of a hub cache lead to another directory
    inside = source.iterdir() if source.is_dir() else [source]
    places = {str(path.resolve().parent) for path in inside} | {
        str(source.resolve() if source.is_dir() else source.parent.resolve())
    }
    with tempfile.TemporaryDirectory(prefix=".reading-", dir=target.parent) as directory:
        program = Program(_MODULE, (str(source.resolve()), str(Path(directory).resolve()), *wanted))
        sandbox = Sandbox(tuple(sorted(places)), (str(Path(directory).resolve()),), _NOT_NEEDED)
        with start_isolated(program, sandbox, _CLOSE_S) as process:
            code = process.wait(_MAX_S)
        _take_files(Path(directory), source, target, code)


def _take_files(made: Path, source: Path, target: Path, code: int) -> None:
    """Move the child's files; a link, which could lead out of its directory, is never followed."""
    files = sorted(made.rglob("*"))
    for path in files:
        if not (stat.S_ISREG(path.lstat().st_mode) or stat.S_ISDIR(path.lstat().st_mode)):
            raise ModelError(f"{source}: the child left {path.name}, which is no plain file; do not trust this model")
    refusal = made / REFUSAL
    if code or refusal in files:
        reason = (
            refusal.read_text(encoding="utf-8", errors="replace")[:2000] if refusal in files else f"exit code {code}"
        )
        reason = _replace_paths(reason, [(str(place), str(source)) for place in (made.resolve(), made)])
        refused = ModelError(f"{source}: cannot be converted: {reason}")
        raise refused.with_facts(code="PHX-I038", file=str(source)) if source.suffix == SUFFIX else refused
    weights = {path for path in files if path.name.endswith((".safetensors", ".safetensors.index.json"))}
    expected_files = weights | {made / TOKENIZER, *tokenizer_companions(made)}
    if source.suffix == SUFFIX:
        expected_files |= {made / "config.json", made / GENERATION}
    for path in files:
        if path in expected_files:
            place = target / path.relative_to(made)
            place.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, place)


def describe_head(source: ModelSource) -> str:
    """Say where the head's weights are."""
    if source.family.ties_head(source.hub_config):
        return f"tied to {source.family.embedding_weight}"
    return source.family.head_weight
