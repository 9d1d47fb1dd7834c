"""The journal of a run, step by step: a killed owner goes on at the step where it died, not at its last checkpoint."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from torch import Tensor

from phalanx.checkpoint import Shard
from phalanx.checkpoint.state_files import read_state, state_path
from phalanx.config import StrictModel, canonical_json
from phalanx.errors import CheckpointError, PhalanxError, SignatureError
from phalanx.pipeline import OWNER, StateDigest
from phalanx.security.audit import AuditLog, LogHead
from phalanx.security.crypto import Identity, Peer, boot_name, in_domain, parse_canonical
from phalanx.train.records.history import RunHistory
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.setup.stage_source import StageLibrary

Fetch = Callable[[str, int, int, Mapping[str, Tensor]], dict[str, Tensor]]
"""Gets a state that another party has kept, given party, stage, step, and names, shapes and types of the state."""

_DOMAIN = "phalanx journal"
_FILE = "journal.json"


class StateFilePlace(StrictModel):
    """The place of one stage's state.

    Attributes:
        party: The party that held it: its process has kept the state.
        digest: Expected digest; None where no digests are taken.
    """

    party: str
    digest: StateDigest | None


class Entry(StrictModel):
    """One verified state of a whole run.

    Attributes:
        step: Steps that are applied, and verified where there is a guard.
        num_events: Length of the audit log when it was written.
        log_digest: Digest of its last line then.
        boot: The boot of the machine that wrote both; only as long as it lasts is all that was written there.
        state: State of a checkpoint of that step beside the tensors.
    """

    run: str
    config_digest: str
    step: int = Field(ge=0)
    num_events: int = Field(ge=0)
    log_digest: str | None = None
    boot: str | None = None
    state: dict[str, Any]
    stages: dict[str, StateFilePlace]

    @property
    def log_head(self) -> LogHead | None:
        """Where the audit log ended when it was written; None in a journal of before this version."""
        return None if self.log_digest is None else LogHead(self.num_events, self.log_digest)


@dataclass
class Journal:
    """The journal, which the owner writes when a step is decided, right before any party updates.

    Attributes:
        directory: Directory of the journal and, beside it, of each process's kept states.
        log_head: Tells where the audit log ends.
        give_up: Told why, when the disk refuses.
    """

    directory: Path
    owner: Identity
    log_head: Callable[[], LogHead]
    give_up: Callable[[str], None]
    _state: dict[str, Any] | None = None
    _refused: bool = False

    def open_step(self, state: dict[str, Any]) -> None:
        """Take a checkpoint's state beside the tensors, before the step's batch is drawn."""
        self._state = state

    def note_verified(self, step: int, holders: Mapping[int, str], digests: Mapping[int, StateDigest]) -> None:
        """Note that the states before this step are verified, and which parties have them."""
        if self._refused or self._state is None or self._state["step"] != step:
            return
        head = self.log_head()
        entry = Entry(
            run=self._state["run"],
            config_digest=self._state["config_digest"],
            step=step,
            num_events=head.num_events,
            log_digest=head.digest,
            boot=boot_name(),
            state=self._state,
            stages={str(s): StateFilePlace(party=party, digest=digests.get(s)) for s, party in holders.items()},
        )
        body = entry.model_dump(mode="json")
        signatures = self.owner.signature_fields(in_domain(_DOMAIN, canonical_json(body)))
        path = self.directory / _FILE
        try:
            path.with_suffix(".writing").write_bytes(canonical_json({"body": body, **signatures}))
            path.with_suffix(".writing").replace(path)
        except OSError as exc:
            self._refused = True
            self.give_up(f"{path}: {exc.strerror or exc}")

    def discard_entry(self) -> None:
        """The state that was noted is undone."""
        clear_journal(self.directory)

    def remove_directory(self) -> None:
        """The run is complete: nothing is to be gone on from."""
        shutil.rmtree(self.directory, ignore_errors=True)


def clear_journal(directory: Path) -> None:
    """Let the journal say nothing any more; what processes keep stays, to be written over."""
    (directory / _FILE).unlink(missing_ok=True)


def read_entry(directory: Path, peer: Peer) -> Entry | None:
    """Read the owner's last entry; None when there is none."""
    path = directory / _FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise CheckpointError(f"{path}: cannot be read: {exc.strerror}") from exc
    try:
        envelope = parse_canonical(data)
        peer.verify_fields(envelope, in_domain(_DOMAIN, canonical_json(envelope["body"])))
        return Entry.model_validate(envelope["body"])
    except (SignatureError, ValidationError, ValueError, KeyError, TypeError) as exc:
        raise CheckpointError(f"{path}: altered, or not signed by {peer.name!r}: {type(exc).__name__}") from exc


def newer_entry(home: RunDirectory, history: RunHistory, log: AuditLog) -> Entry | None:
    """Return the owner's note after its newest checkpoint; None when there is nothing newer.

    Raises:
        CheckpointError: It is malformed, altered, foreign, of steps that were undone since, or knows lines of the
            audit log that a crash of the machine has cost.
    """
    entry = read_entry(home.journal_directory, home.owner.public)
    if entry is None or entry.step <= (history.certified.newest_step or 0):
        return None
    if entry.run != home.run_id or entry.config_digest not in history.configs:
        raise CheckpointError(f"{home.journal_directory / _FILE}: it belongs to another run or config")
    if entry.num_events < history.undone_at:
        raise CheckpointError(f"{home.journal_directory / _FILE}: its steps were undone since")
    if entry.log_head is not None and not log.contains_head(entry.log_head):
        raise CheckpointError(f"{home.journal_directory / _FILE}: the audit log lacks lines that it names")
    return entry


def read_kept_states(
    directory: Path, entry: Entry, library: StageLibrary, fetch: Fetch | None = None
) -> Iterator[Shard]:
    """Read every stage's kept state, one after the other, and check it against the entry.

    Args:
        fetch: Gets what other parties than the owner have kept; None where they have kept it in `directory`.
    """
    for stage in range(library.num_stages):
        place = entry.stages.get(str(stage))
        if place is None:
            raise CheckpointError(f"{directory / _FILE}: has no entry for stage {stage}")
        copy, is_here = library(stage), fetch is None or place.party == OWNER
        path = state_path(directory, stage, place.party, entry.step)
        place_text = str(path) if is_here else f"stage {stage}, kept by {place.party}"
        if place.digest is None and not is_here:
            raise CheckpointError(f"{place_text}: the state was not verified")
        try:
            if fetch is None or is_here:
                state = read_state(path, entry.step)
            else:
                state = fetch(place.party, stage, entry.step, copy.optimizer.state_tensors())
            copy.optimizer.load_state(state, entry.step)
        except CheckpointError:
            raise
        except PhalanxError as exc:
            raise CheckpointError(f"{place_text}: {exc}") from exc
        if place.digest is not None and copy.compute_digest() != place.digest:
            raise CheckpointError(f"{place_text}: differs from the verified state")
        yield Shard(stage, copy.optimizer.state_tensors(), entry.step)
