"""Targets of acts with two people: an approval is good for its target alone, and stale after the act."""

import hashlib
import re
from pathlib import Path

from phalanx.checkpoint import manifest_digest, step_directory
from phalanx.checkpoint.keys import KEY_FILE
from phalanx.config import load_config
from phalanx.data.shards.dataset import manifest_bytes
from phalanx.data.shards.manifest import DATASET_FILE, dataset_digest, verify_dataset
from phalanx.data.shards.seal import WRAPPED_KEY_FILE
from phalanx.errors import ConfigError, InputError
from phalanx.governance.release import release_target
from phalanx.policy import Action, ProjectRoles, TrainingPolicy
from phalanx.security.crypto import read_public
from phalanx.serve.place import checkpoint_place, is_run
from phalanx.train import PastRun

_PRINTED = re.compile(r"[0-9a-zA-Z:-]{16,300}")


def name_target(action: Action, place: Path) -> str:
    """Return the target of an act.

    Args:
        place: A run, model, dataset, policy or file of keys; or a target, as a refusal prints it.

    Raises:
        ConfigError: The act is not done to such a place.
    """
    if not place.exists() and _PRINTED.fullmatch(str(place)):
        return str(place)
    match action:
        case "release":
            return release_target(place)
        case "policy_change":
            is_of_roles = "\n[people" in read_public(place).decode("utf-8", "replace")
            return load_config(place, ProjectRoles).digest if is_of_roles else load_config(place, TrainingPolicy).digest
        case "decryption":
            if _is_of_run(place):
                return manifest_digest(_checkpoint_of(place))
            return dataset_digest(verify_dataset(manifest_bytes(place), place / DATASET_FILE).manifest)
        case "key_rotation":
            return hashlib.sha256(_read_wrapped_key(place)).hexdigest()


def _is_of_run(place: Path) -> bool:
    return is_run(place) or checkpoint_place(place) is not None


def _checkpoint_of(place: Path) -> Path:
    if checkpoint_place(place) is not None:
        return place
    past = PastRun(place)
    if not past.certified_steps:
        raise ConfigError(f"{place}: has no checkpoint")
    return past.checkpoints / step_directory(past.certified_steps[0])


def _read_wrapped_key(place: Path) -> bytes:
    """Return the file that a rotation replaces: after it, an approval is of another one."""
    file = place
    if place.is_dir():
        file = _checkpoint_of(place) / KEY_FILE if _is_of_run(place) else place / WRAPPED_KEY_FILE
    try:
        return file.read_bytes()
    except OSError as exc:
        raise InputError(f"{file}: cannot be read ({exc.strerror}); name what has a key to rotate") from exc
