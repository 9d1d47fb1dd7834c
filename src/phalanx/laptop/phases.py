"""Records of finished phases on disk: a killed command goes on with the first phase that has none."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from phalanx.config import StrictModel
from phalanx.errors import ConfigError, DataError
from phalanx.laptop.plan import PHASES, TRAINED, Phase

RECORDS = "done"
FILE_OF: Mapping[Phase, str] = {phase: f"{phase}.toml" for phase in ("tokenizer", *TRAINED)}
"""What the user may change before a phase begins."""
RESULTS_OF: Mapping[Phase, tuple[str, ...]] = {
    "tokenizer": ("tokenizer",),
    "pretrain": ("runs/pretrain", "models/pretrain"),
    "chat": ("runs/chat", "models/chat"),
    "preferences": ("runs/preferences", "model"),
    "evaluate": (),
    "report": ("results.json",),
}
"""What each phase makes, below the folder."""


class PhaseRecord(StrictModel):
    """A phase that is done.

    Attributes:
        inputs: SHA-256 over its run file and the run files of all phases before it.
        seconds: Time that the finishing start spent in it.
        is_resumed: Whether an earlier start was killed or interrupted in it, whose time is not in `seconds`.
        facts: Figures for the table at the end.
    """

    phase: Phase
    inputs: str
    seconds: float
    is_resumed: bool
    facts: dict[str, Any]


def digest_inputs(folder: Path) -> dict[Phase, str]:
    """Return, for each phase, the digest of its run file and of those before it."""
    digests: dict[Phase, str] = {}
    before = b""
    for phase in PHASES:
        name = FILE_OF.get(phase)
        try:
            content = b"" if name is None else (folder / name).read_bytes()
        except OSError as exc:
            raise DataError(
                f"{folder / str(name)}: cannot be read ({exc.strerror}); the phase {phase} needs it"
            ) from exc
        digests[phase] = hashlib.sha256(before + hashlib.sha256(content).digest()).hexdigest()
        before = bytes.fromhex(digests[phase])
    return digests


def read_records(folder: Path) -> dict[Phase, PhaseRecord]:
    """Return the records of phases that are done."""
    records: dict[Phase, PhaseRecord] = {}
    for phase in PHASES:
        path = folder / RECORDS / f"{phase}.json"
        if path.is_file():
            try:
                records[phase] = PhaseRecord.model_validate_json(path.read_text(encoding="utf-8"))
            except (OSError, ValueError, ValidationError) as exc:
                raise DataError(f"{path}: is damaged; repeat the phase with --redo {phase}") from exc
    return records


def list_open_phases(records: Mapping[Phase, PhaseRecord], inputs: Mapping[Phase, str]) -> Sequence[Phase]:
    """Return the phases that are to be run, in order: the first without a record and all behind it."""
    for index, phase in enumerate(PHASES):
        record = records.get(phase)
        if record is None:
            return PHASES[index:]
        if record.inputs != inputs[phase]:
            name = FILE_OF.get(phase, "a run file before it")
            raise ConfigError(
                f"{name}: was changed after the phase {phase} was done; take the change back, or train by it from "
                f"there on with --redo {phase}"
            ).with_facts(key="--redo", found="a changed run file", do=f"--redo {phase}")
    return ()


def write_record(folder: Path, record: PhaseRecord) -> None:
    """Write the record of a phase, whole or not at all; the phase's results are on disk before."""
    path = folder / RECORDS / f"{record.phase}.json"
    write_whole(path, record.model_dump_json(indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all, and survives a loss of power."""
    path.parent.mkdir(exist_ok=True)
    spare = path.with_suffix(path.suffix + ".part")
    with spare.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    spare.replace(path)


def forget_phases(folder: Path, first: Phase, remove: Any) -> None:
    """Remove records and results of a phase and of all behind it; run files stay.

    Args:
        remove: Removes a file or a directory; called with each path that is there.
    """
    behind = PHASES[PHASES.index(first) :]
    # the last record goes first: a crash leaves results without a record, which are made anew
    for phase in reversed(behind):
        for suffix in ("json", "begun"):
            (folder / RECORDS / f"{phase}.{suffix}").unlink(missing_ok=True)
    for phase in behind:
        for name in RESULTS_OF[phase]:
            if (folder / name).exists():
                remove(folder / name)


def dump_lines(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
