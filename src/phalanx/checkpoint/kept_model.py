"""The part of a model that a run directory keeps beside the weights, so that an export needs neither text nor model."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.checkpoint.export import RunTokenizer, copy_run_tokenizer
from phalanx.data.chat import TEMPLATE_FILE
from phalanx.errors import CheckpointError
from phalanx.models import ModelSource
from phalanx.models.cache import written_once
from phalanx.models.directory import TOKENIZER
from phalanx.models.hub_files import GENERATION

KEPT_MODEL = "kept_model"
"""Directory, inside that of the run."""
_FACTS = "phalanx_tokenizer.json"


def keep_model(run_dir: Path, source: ModelSource, tokenizer: RunTokenizer) -> None:
    """Keep config, generation defaults and tokenizer of a run in its directory; what it keeps already stays.

    Raises:
        ModelError: The directory cannot be written.
    """

    def write(target: Path) -> None:
        _write_json(target / "config.json", source.hub_config_dict)
        if (source.directory / GENERATION).is_file():
            shutil.copyfile(source.directory / GENERATION, target / GENERATION)
        copy_run_tokenizer(tokenizer, target)
        chat = {} if tokenizer.template is None else {"end_of_turn": tokenizer.end_of_turn}
        _write_json(target / _FACTS, {"eos_id": tokenizer.eos_id, "of_model": tokenizer.of_model, **chat})

    written_once(run_dir / KEPT_MODEL, write)


def kept_files(run_dir: Path) -> dict[str, str]:
    """Return the SHA-256, in hex, of every file that a run directory keeps of its model; none where it keeps none.

    Raises:
        CheckpointError: One cannot be read.
    """
    home = run_dir / KEPT_MODEL
    try:
        files = sorted(path for path in home.rglob("*") if not path.is_dir())
        return {str(path.relative_to(home)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    except OSError as exc:
        raise CheckpointError(f"{exc.filename}: cannot be read ({exc.strerror}); allow it") from exc


def check_kept(run_dir: Path, state: Mapping[str, Any]) -> bool:
    """Compare what a run directory keeps of its model with the digests that a checkpoint has signed.

    Args:
        run_dir: The directory.
        state: Of the checkpoint.

    Returns:
        Whether the checkpoint names any; those of before this version name none.

    Raises:
        CheckpointError: A file was changed, added or removed.
    """
    signed = state.get("kept")
    if signed is None:
        return False
    found = kept_files(run_dir)
    if found != signed:
        name = min(name for name in {*found, *signed} if found.get(name) != signed.get(name))
        path, do = run_dir / KEPT_MODEL / name, f"put {run_dir / KEPT_MODEL} back as the run wrote it"
        was, now = str(signed.get(name, "no file")), found.get(name, "no file")
        raise CheckpointError(
            f"{path}: altered: found SHA-256 {now:.16}, the checkpoint of step {state['step']} has signed {was:.16}; "
            f"{do}"
        ).about(code="PHX-I058", file=str(path), found=now, expected=was, do=do)
    return True


def open_kept(run_dir: Path) -> tuple[ModelSource, RunTokenizer]:
    """Open what `check_kept` has found to be whole: the model without weights, and the tokenizer of its run.

    Raises:
        CheckpointError: It is of another version.
        ModelError: The config is of a family that is not known here.
    """
    home = run_dir / KEPT_MODEL
    try:
        facts = json.loads((home / _FACTS).read_text(encoding="utf-8"))
        tokenizer = RunTokenizer(
            home / TOKENIZER,
            int(facts["eos_id"]),
            of_model=bool(facts["of_model"]),
            template=home / TEMPLATE_FILE if "end_of_turn" in facts else None,
            end_of_turn=facts.get("end_of_turn"),
        )
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise CheckpointError(f"{home / _FACTS}: is of another version of Phalanx ({exc}); export with that") from exc
    return ModelSource(home, weightless=True), tokenizer


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
