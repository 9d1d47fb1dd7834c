"""A new key in the place of an old one: only wrapped data keys are written again, no tensor and no signature."""

import os
from pathlib import Path

from phalanx.checkpoint.keys import KEY_FILE, KeyHolder, unwrap_for, wrap_for
from phalanx.checkpoint.manifest import MANIFEST_FILE, list_checkpoints, verify_manifest
from phalanx.checkpoint.save import sync_directory
from phalanx.errors import CheckpointError
from phalanx.security.crypto import Peer


def rotate_keys(directory: Path, peer: Peer, old: KeyHolder, new: KeyHolder) -> list[int]:
    """Wrap the data key of every encrypted checkpoint with another key; each is replaced in one go.

    What `new` has wrapped already, as an interrupted rotation leaves it, is left as it is. Copies of the old
    ``key.json``, in backups for instance, still open with the old key: the data keys stay the same.

    Returns:
        Steps of the checkpoints that open with `new` now.
    """
    try:
        checkpoints = sorted(list_checkpoints(directory).items())
        return [step for step, path in checkpoints if _rotate_checkpoint(path, peer, old, new)]
    except OSError as exc:
        raise CheckpointError(f"{exc.filename or directory}: cannot be read or written ({exc.strerror})") from exc


def _rotate_checkpoint(path: Path, peer: Peer, old: KeyHolder, new: KeyHolder) -> bool:
    manifest = verify_manifest((path / MANIFEST_FILE).read_bytes(), peer, path / MANIFEST_FILE)
    if manifest.encryption is None:
        return False
    place = path / KEY_FILE
    data = place.read_bytes()
    try:
        unwrap_for(new, data, manifest.run, manifest.step, place)
    except CheckpointError:
        data_key = unwrap_for(old, data, manifest.run, manifest.step, place)
        # beside the checkpoint, not inside: a file that the manifest does not name would make it unreadable
        spare = path.with_name(f".writing-{path.name}-{KEY_FILE}")
        with spare.open("wb") as file:
            file.write(wrap_for(new, data_key, manifest.run, manifest.step))
            file.flush()
            os.fsync(file.fileno())
        spare.replace(place)
        sync_directory(path)
    return True
