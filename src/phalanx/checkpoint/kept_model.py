"""The part of a model that a run directory keeps beside the weights, so that an export needs neither text nor model."""

import base64
import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from phalanx.checkpoint.export import RunTokenizer, copy_run_tokenizer
from phalanx.checkpoint.keys import KEY_FILE, KeyHolder, new_data_key, unwrap_for, wrap_for
from phalanx.checkpoint.sealed import SEALED, FilePlace, FileSealer
from phalanx.config import canonical_json
from phalanx.data.chat import TEMPLATE_FILE
from phalanx.errors import CheckpointError
from phalanx.models import ModelSource
from phalanx.models.cache import written_once
from phalanx.models.directory import TOKENIZER
from phalanx.models.hub_files import GENERATION

KEPT_MODEL = "kept_model"
"""Directory, inside that of the run."""
_FACTS = "phalanx_tokenizer.json"
_PACK = f"model{SEALED}"
"""All of it in one file, where checkpoints are encrypted; the wrapped key of that lies beside it."""


def keep_model(
    run_dir: Path, source: ModelSource, tokenizer: RunTokenizer, seal: tuple[KeyHolder, str] | None = None
) -> None:
    """Copy config, generation defaults and tokenizer of a run into its directory; existing copies stay.

    Args:
        seal: The key of its checkpoints, and the run's name, where those are encrypted: so is this.
    """

    def write_plain(target: Path) -> None:
        _write_json(target / "config.json", source.hub_config_dict)
        if (source.directory / GENERATION).is_file():
            shutil.copyfile(source.directory / GENERATION, target / GENERATION)
        copy_run_tokenizer(tokenizer, target)
        chat = {} if tokenizer.template is None else {"end_of_turn": tokenizer.end_of_turn}
        _write_json(target / _FACTS, {"eos_id": tokenizer.eos_id, "of_model": tokenizer.of_model, **chat})

    def write_sealed(target: Path) -> None:
        holder, run = seal or (None, "")
        if holder is None:
            return write_plain(target)
        data_key = new_data_key()
        with tempfile.TemporaryDirectory(prefix="phalanx-kept-") as plain:
            write_plain(Path(plain))
            pack = {path.name: base64.b64encode(path.read_bytes()).decode() for path in Path(plain).iterdir()}
        sealed = FileSealer(data_key).seal_file(FilePlace(run, 0, _PACK), [canonical_json(pack)])
        (target / _PACK).write_bytes(b"".join(sealed))
        (target / KEY_FILE).write_bytes(wrap_for(holder, data_key, run, 0))
        return None

    written_once(run_dir / KEPT_MODEL, write_sealed)


def kept_files(run_dir: Path) -> dict[str, str]:
    """Return the SHA-256, in hex, of every file that a run directory keeps of its model; none where it keeps none."""
    home = run_dir / KEPT_MODEL
    try:
        files = sorted(path for path in home.rglob("*") if not path.is_dir())
        if home / _PACK in files:
            # of checkpoints the wrapped key is not signed either: it is another one after a rotation
            files = [path for path in files if path != home / KEY_FILE]
        return {str(path.relative_to(home)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    except OSError as exc:
        raise CheckpointError(f"{exc.filename}: cannot be read ({exc.strerror}); allow it") from exc


def check_kept(run_dir: Path, state: Mapping[str, Any]) -> bool:
    """Compare a run directory's copies of its model with the digests that a checkpoint has signed.

    Returns:
        Whether the checkpoint names any digest; checkpoints of earlier versions name none.
    """
    signed = state.get("kept")
    if signed is None:
        return False
    digests = kept_files(run_dir)
    if digests != signed:
        name = min(name for name in {*digests, *signed} if digests.get(name) != signed.get(name))
        path, do = run_dir / KEPT_MODEL / name, f"restore {run_dir / KEPT_MODEL} from a copy of the run"
        was, now = str(signed.get(name, "no file")), digests.get(name, "no file")
        raise CheckpointError(
            f"{path}: altered: found SHA-256 {now:.16}, the checkpoint of step {state['step']} has signed {was:.16}; "
            f"{do}"
        ).with_facts(code="PHX-I058", file=str(path), found=now, expected=was, do=do)
    return True


@contextlib.contextmanager
def open_kept(run_dir: Path, key: KeyHolder | None, run: str) -> Iterator[tuple[ModelSource, RunTokenizer]]:
    """Open what `check_kept` has found to be whole: the model without weights, and the tokenizer of its run."""
    home = run_dir / KEPT_MODEL
    if not (home / _PACK).is_file():
        yield _open_home(home)
        return
    if key is None:
        raise CheckpointError(f"{home}: is encrypted, but the config of the run names no key; restore the config")
    data_key = unwrap_for(key, _read_file(home / KEY_FILE), run, 0, home / KEY_FILE)
    plain = FileSealer(data_key).open_file(FilePlace(run, 0, _PACK), _read_file(home / _PACK), str(home / _PACK))
    with tempfile.TemporaryDirectory(prefix="phalanx-kept-") as opened:
        for name, content in json.loads(plain).items():
            (Path(opened) / Path(name).name).write_bytes(base64.b64decode(content))
        yield _open_home(Path(opened))


def rotate_kept(run_dir: Path, run: str, old: KeyHolder, new: KeyHolder) -> None:
    """Wrap the key of an encrypted run's copies with another key; a key that is wrapped with it already stays."""
    place = run_dir / KEPT_MODEL / KEY_FILE
    if not (run_dir / KEPT_MODEL / _PACK).is_file():
        return
    data = _read_file(place)
    try:
        unwrap_for(new, data, run, 0, place)
    except CheckpointError:
        spare, data_key = run_dir / f".{KEPT_MODEL}-{KEY_FILE}", unwrap_for(old, data, run, 0, place)
        try:
            spare.write_bytes(wrap_for(new, data_key, run, 0))
            spare.replace(place)
        except OSError as exc:
            raise CheckpointError(f"{place}: cannot be written ({exc.strerror}); the old key still opens it") from exc


def _open_home(home: Path) -> tuple[ModelSource, RunTokenizer]:
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
        raise CheckpointError(
            f"{home / _FACTS}: is from another version of Phalanx ({exc}); export with that version"
        ) from exc
    return ModelSource(home, weightless=True), tokenizer


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise CheckpointError(f"{path}: cannot be read ({exc.strerror}); restore it") from exc


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
