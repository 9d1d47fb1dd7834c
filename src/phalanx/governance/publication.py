"""What an owner publishes so that strangers can recompute a run: log, certified states, and the data where it may.

A publication is a directory of the form of a run's, without keys, tokens and journals. Every file of it is in a
manifest that the owner signs; a reader takes no other file, follows no link and unpickles nothing.
"""

import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from phalanx.checkpoint import list_checkpoints
from phalanx.config import StrictModel, canonical_json
from phalanx.errors import (
    CertificateError,
    ConfigError,
    DataError,
    InputError,
    SignatureError,
    VerificationError,
)
from phalanx.models import open_model
from phalanx.pipeline import OWNER
from phalanx.security.audit.line import read_entries
from phalanx.security.crypto import Identity, Peer, in_domain, load_identity, parse_canonical
from phalanx.train import PastRun
from phalanx.train.config import PipelineRun
from phalanx.train.records.audit_trail import LOG_FILE
from phalanx.train.records.lineage import dataset_of
from phalanx.train.records.log_heads import SUMMARY_FILE
from phalanx.train.records.owner_key import owner_of
from phalanx.train.records.run_directory import OWNER_CERTIFICATE, cache_beside
from phalanx.verifier.forms import RefusedError, UnreadableError
from phalanx.verifier.passport import verify_passport

PUBLICATION_FILE = "publication.json"
PASSPORT_FILE = "run.passport"
DATA, MODEL, STATES = "data", "model", "checkpoints"
_DOMAIN = "publication/1"
_MAX_MANIFEST_BYTES = 2**26
_SUMMARY_KEYS = ("status", "steps", "wall_s", "final_weights_digest", "audit_log_head", "audit_log_head_signed")
_WHOLE_FILES = (LOG_FILE, "steps.jsonl", OWNER_CERTIFICATE, "run.json", "config.toml")
_FILE_NAME = re.compile(
    r"events\.jsonl|steps\.jsonl|owner\.pem|run\.json|config\.toml|summary\.json|run\.passport"
    r"|checkpoints/step-\d{8,12}/(manifest\.json|state\.json|stage-(0|[1-9]\d{0,5})\.safetensors)"
    r"|data/(dataset|manifest|tokenizer)\.json|data/shards/[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}/[a-z0-9-]{1,32}(\.tree)?"
    r"|model/[A-Za-z0-9_-][A-Za-z0-9_.-]{0,128}\.(json|safetensors|txt|model)"
)
"""Every name that a published file may have: nothing that a library would execute or unpickle is among them."""
_DATA_FILE = re.compile(r"(dataset|manifest|tokenizer)\.json|shards/.*")
_PICKLES = re.compile(r"\.(pkl|pickle|pt|pth|ckpt|bin|py|so)\Z", re.IGNORECASE)
_LOGIN = re.compile(rb"://[^/\s\"']*:[^/\s\"'@]+@")
"""An address with a password in it."""

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]


class PublishedFile(StrictModel):
    """Size and SHA-256 of a file."""

    size_bytes: int = Field(ge=0, le=2**50)
    sha256: Digest


class PublicationManifest(StrictModel):
    """What a publication holds.

    Attributes:
        log_events: Number of lines of the log, the last of which has `log_digest`.
        passport: SHA-256 of the passport that belongs to it; None where there is none.
        states: Steps of the published states.
        corpus: SHA-256 of all that batches were drawn from, as the log has it.
        dataset: SHA-256 of the manifest file of the data; None where the data set is not here to be hashed.
        base: Digest of the files that the model began with; None where its seed draws it.
    """

    format: Literal["phalanx-publication"] = "phalanx-publication"
    version: Literal[1] = 1
    run: str
    log_events: int
    log_digest: Digest
    passport: Digest | None
    states: tuple[int, ...]
    corpus: Digest | None
    dataset: Digest | None
    base: str | None
    files: dict[str, PublishedFile] = Field(max_length=10**6)


@dataclass(frozen=True)
class PublicationChoice:
    """What an owner publishes.

    Attributes:
        every: Smallest distance in steps of two published states.
        with_data: Publish the tokens, and not their digest alone.
        with_model: Publish the files that the model began with.
        passport: Passport of the run, which the manifest names.
        identity: Directory of the owner's keys; None takes the run's own.
    """

    every: int = 1
    with_data: bool = False
    with_model: bool = False
    passport: Path | None = None
    identity: Path | None = None


@dataclass(frozen=True)
class PublicationPrice:
    """The bytes of a publication by kind, known before anything is written.

    Attributes:
        rows: Bytes by name; rows in `left_out` are among them.
        left_out: Names of rows that are not published by this choice.
        longest: Steps of the longest segment between two states, which is the least that a stranger recomputes.
    """

    rows: Mapping[str, int]
    left_out: tuple[str, ...]
    states: tuple[int, ...]
    longest: int

    @property
    def total_bytes(self) -> int:
        """Bytes that would be published."""
        return sum(size for name, size in self.rows.items() if name not in self.left_out)


class Publisher:
    """Publishes one run.

    Raises:
        ConfigError: The run is of a kind, or has secrets, that keep strangers from recomputing it.
        CertificateError: The owner's keys are not here, or are another owner's.
    """

    def __init__(self, past: PastRun, choice: PublicationChoice) -> None:
        self._past, self._choice = past, choice
        why = why_not_recomputed(past)
        if why is not None:
            raise ConfigError(f"{past.path}: strangers cannot recompute this run: {why}")
        self._states = spread_states(past.certified_steps, set(list_checkpoints(past.checkpoints)), choice.every)
        self._data = _data_directory(past)
        self._source = open_model(past.config.model, cache_beside(past.path) / "models", past.config.train.seed)

    def estimate_price(self) -> PublicationPrice:
        """Return the bytes of everything that could be published."""
        choice = self._choice
        rows = {name: sum(path.stat().st_size for _, path in files) for name, files in self._groups().items()}
        num_steps = max((self._num_steps, *self._states))
        bounds = sorted({0, *self._states, num_steps})
        left_out = [*([] if choice.with_data else [DATA]), *([] if choice.with_model else [MODEL])]
        return PublicationPrice(
            rows={**rows, "boundary messages": 0},
            left_out=tuple(name for name in left_out if name in rows),
            states=self._states,
            longest=max((later - step for step, later in itertools.pairwise(bounds)), default=0),
        )

    def publish_run(self, out: Path) -> "RunPublication":
        """Write the publication to a new directory, and read it as a stranger does.

        Raises:
            ConfigError: There is such a directory, or an address with a password would be published.
            InputError: It cannot be written.
        """
        if out.exists():
            raise ConfigError(f"{out}: exists; name a new directory")
        owner = self._load_owner()
        try:
            with tempfile.TemporaryDirectory(prefix=".phalanx-publication-", dir=out.absolute().parent) as scratch:
                home = Path(scratch) / "publication"
                self._copy_files(home)
                manifest = self._make_manifest(home)
                body = manifest.model_dump(mode="json")
                signatures = owner.signature_fields(in_domain(_DOMAIN, canonical_json(body)))
                (home / PUBLICATION_FILE).write_bytes(canonical_json({"body": body, **signatures}))
                open_publication(home)
                home.replace(out)
        except OSError as exc:
            raise InputError(f"{out}: cannot be written ({exc.strerror})") from exc
        return open_publication(out)

    @property
    def _num_steps(self) -> int:
        summary = read_summary(self._past.path)
        steps = summary.get("steps")
        return steps if isinstance(steps, int) and not isinstance(steps, bool) else 0

    def _load_owner(self) -> Identity:
        past = self._past
        home = self._choice.identity or (Path(past.config.pki) if past.config.pki else past.path / "pki") / OWNER
        owner = load_identity(home)
        if owner.public != past.owner:
            raise CertificateError(f"{home}: holds the keys of another owner than the run's")
        return owner

    def _groups(self) -> dict[str, list[tuple[str, Path]]]:
        """Return names and sources of all files that could be published, by group."""
        past = self._past
        groups = {"log": [(name, past.path / name) for name in _WHOLE_FILES if (past.path / name).exists()]}
        homes = list_checkpoints(past.checkpoints)
        groups["states"] = [
            (f"{STATES}/{homes[step].name}/{path.name}", path)
            for step in self._states
            for path in sorted(homes[step].iterdir())
        ]
        if self._data is not None:
            data = [(name, path) for name, path in _tree_files(self._data) if _DATA_FILE.fullmatch(name)]
            groups[DATA] = [(f"{DATA}/{name}", path) for name, path in data]
        if past.config.model.path is not None:
            model = [(f"{MODEL}/{name}", path) for name, path in _tree_files(Path(past.config.model.path))]
            groups[MODEL] = [(name, path) for name, path in model if _FILE_NAME.fullmatch(name)]
        if self._choice.passport is not None:
            groups["passport"] = [(PASSPORT_FILE, self._choice.passport)]
        return groups

    def _copy_files(self, home: Path) -> None:
        left_out = self.estimate_price().left_out
        for group, files in self._groups().items():
            for name, source in [] if group in left_out else files:
                if _FILE_NAME.fullmatch(name) is None or source.is_symlink():
                    raise ConfigError(f"{source}: has a name, or is a link, that no stranger would accept")
                (home / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, home / name)
                if group == "log" and _LOGIN.search(source.read_bytes()):
                    raise ConfigError(f"{source}: has an address with a password in it; nothing is published")
        summary = read_summary(self._past.path)
        if summary:
            public = {key: summary[key] for key in _SUMMARY_KEYS if key in summary}
            (home / SUMMARY_FILE).write_bytes(canonical_json(public) + b"\n")

    def _make_manifest(self, home: Path) -> PublicationManifest:
        past = self._past
        with (home / LOG_FILE).open("rb") as file:
            entries = list(read_entries(file, home / LOG_FILE, past.owner, past.run_id))
        corpora = {str(entry.body["corpus"]) for entry in entries if "corpus" in entry.body}
        if self._choice.passport is not None:
            check_passport(home / PASSPORT_FILE, past.owner, past.run_id, entries[-1].head.digest)
        dataset = None if self._data is None else self._data / "dataset.json"
        files = {
            name: PublishedFile(size_bytes=path.stat().st_size, sha256=_hash_file(path)) for name, path in _walk(home)
        }
        return PublicationManifest(
            run=past.run_id,
            log_events=len(entries),
            log_digest=entries[-1].head.digest,
            passport=files[PASSPORT_FILE].sha256 if PASSPORT_FILE in files else None,
            states=self._states,
            corpus=corpora.pop() if len(corpora) == 1 else None,
            dataset=_hash_file(dataset) if dataset is not None and dataset.exists() else None,
            base=None if past.config.model.from_scratch else self._source.files_digest(),
            files=files,
        )


@dataclass(frozen=True)
class RunPublication:
    """A publication whose owner has signed every file of it as it is.

    Attributes:
        digest: SHA-256 of the signed manifest.
        is_expected: Whether the reader brought the owner's certificate.
    """

    path: Path
    manifest: PublicationManifest
    owner: Peer
    digest: str
    is_expected: bool

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.manifest.files.values())


def open_publication(path: Path, certificate: Path | None = None) -> RunPublication:
    """Check every byte of a publication before anything of it is used.

    Args:
        path: Its directory, or the passport in it.
        certificate: Copy of the owner's certificate; None takes the published copy.

    Raises:
        InputError: It is none, or cannot be read.
        VerificationError: A file is missing, altered, over-long, a link, of a name that none may have, or not named by
            the manifest; or another key signed.

    Guarantees:
        An attacker without the owner's keys can change no byte. No file is read beyond the size that was signed.
    """
    path = path.parent if path.is_file() else path
    file = path / PUBLICATION_FILE
    data = _read_small(file, _MAX_MANIFEST_BYTES)
    _read_small(path / OWNER_CERTIFICATE, 2**20)
    owner = owner_of(certificate or path / OWNER_CERTIFICATE)
    manifest = _read_manifest(data, owner, file)
    present = dict(_walk(path))
    present.pop(PUBLICATION_FILE, None)
    for name in sorted(present.keys() ^ manifest.files.keys()):
        missing = name in manifest.files
        raise VerificationError(f"{path / name}: {'missing' if missing else 'the signed manifest does not name it'}")
    for name, listed in sorted(manifest.files.items()):
        if _FILE_NAME.fullmatch(name) is None:
            raise VerificationError(f"{path}: {name!r:.200} is no name that a published file may have")
        size = present[name].stat().st_size
        if size != listed.size_bytes:
            raise VerificationError(f"{path / name}: {size} bytes, the signed manifest says {listed.size_bytes}")
        if _hash_file(present[name]) != listed.sha256:
            raise VerificationError(f"{path / name}: altered: has another digest than the signed manifest says")
    publication = RunPublication(path, manifest, owner, hashlib.sha256(data).hexdigest(), certificate is not None)
    if manifest.passport is not None:
        if manifest.files.get(PASSPORT_FILE) is None or manifest.files[PASSPORT_FILE].sha256 != manifest.passport:
            raise VerificationError(f"{path / PASSPORT_FILE}: is another passport than the manifest is bound to")
        check_passport(path / PASSPORT_FILE, owner, manifest.run, manifest.log_digest)
    return publication


def check_passport(path: Path, owner: Peer, run: str, log_digest: str) -> None:
    """Return when a passport holds and its log ends with this line.

    Raises:
        VerificationError: It does not.
    """
    try:
        facts = verify_passport(path, owner.public_key.hex()).facts
    except (RefusedError, UnreadableError) as exc:
        raise VerificationError(f"{path}: {exc}") from exc
    if facts["run"] != run or facts["log"]["digest"] != log_digest:
        raise VerificationError(f"{path}: is the passport of another run, or of another end of this one's log")


def staged_run(past: PastRun) -> PipelineRun:
    """Return the config of a run that strangers can recompute.

    Raises:
        ConfigError: It is another one.
    """
    if not isinstance(past.config, PipelineRun):
        raise ConfigError(f"{past.path}: is no pipeline run")
    return past.config


def why_not_recomputed(past: PastRun) -> str | None:
    """Say why nobody but the owner can recompute a run; None where strangers can."""
    run = past.config
    if not isinstance(run, PipelineRun):
        return "only pipeline runs sign what each step did; a domain, a split or clients do not"
    reasons = {
        "its checkpoints are encrypted": run.checkpoint.encrypt or run.checkpoint.key is not None,
        "it hides rows with noise, which follows from a secret key": run.privacy is not None,
        "it learns from texts that it generated": run.rewards is not None or run.train.learns_from_texts,
        "it learns several objectives, and some from data that is prepared apart": bool(run.objectives),
        "it learns from pairs, with a reference that is stored apart": run.data.preferences is not None,
        "it learns from labelled texts": run.data.labelled is not None,
        "it runs code of the owner's own": bool(run.own_code),
        "its data set is encrypted": run.data.dataset is not None and run.data.dataset.key_file is not None,
        "ranks share stages, and add up in another order": any(
            run.pipeline.layout_of(name).num_ranks > 1 for name in run.pipeline.worker_names
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def spread_states(certified: list[int], present: set[int], every: int) -> tuple[int, ...]:
    """Return the steps of the states to publish: the newest one, and before it no two nearer than `every` steps."""
    chosen: list[int] = []
    for step in sorted(set(certified) & present, reverse=True):
        if not chosen or chosen[-1] - step >= every:
            chosen.append(step)
    return tuple(reversed(chosen))


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Read a run's summary; empty where there is none."""
    try:
        summary = json.loads((run_dir / SUMMARY_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def _data_directory(past: PastRun) -> Path | None:
    try:
        return dataset_of(past)[0]
    except DataError:
        return None


def _read_manifest(data: bytes, owner: Peer, file: Path) -> PublicationManifest:
    try:
        envelope = parse_canonical(data)
        body = envelope.pop("body")
        is_plain = all(bytes.fromhex(signature).hex() == signature for signature in envelope.values())
    except (ValueError, KeyError, TypeError) as exc:
        raise VerificationError(f"{file}: is no manifest of a publication ({exc!s:.200})") from exc
    if not is_plain or set(envelope) - {"signature"} != ({"ml_dsa_44"} if owner.ml_dsa_key else set()):
        raise VerificationError(f"{file}: {owner.name} did not sign it: its keys are {sorted(envelope)[:10]}")
    try:
        owner.verify_fields(envelope, in_domain(_DOMAIN, canonical_json(body)))
        return PublicationManifest.model_validate_json(canonical_json(body))
    except SignatureError as exc:
        raise VerificationError(f"{file}: {owner.name} did not sign it, or it was altered") from exc
    except ValueError as exc:
        raise VerificationError(f"{file}: is no manifest of a publication ({exc!s:.200})") from exc


def _walk(home: Path) -> Iterator[tuple[str, Path]]:
    """Yield every file below a directory by its path there.

    Raises:
        VerificationError: Something is neither a regular file nor a directory, or could hold code.
    """
    for directory, folders, names in os.walk(home):
        for name in sorted((*folders, *names)):
            path = Path(directory) / name
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise VerificationError(f"{path}: is a link, a pipe or a device; a publication has files alone")
            if stat.S_ISREG(mode):
                if _PICKLES.search(name):
                    raise VerificationError(f"{path}: could hold code; a publication has no such files")
                yield path.relative_to(home).as_posix(), path


def _tree_files(home: Path) -> list[tuple[str, Path]]:
    return sorted((path.relative_to(home).as_posix(), path) for path in home.rglob("*") if path.is_file())


def _open_regular(path: Path) -> BufferedReader:
    """Open a file for reading, if it is one: a link leads elsewhere, and a pipe never ends."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise VerificationError(f"{path}: is a link; a publication has files alone") from exc
        raise InputError(f"{path}: cannot be read ({exc.strerror}); expected a directory of phalanx publish") from exc
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise VerificationError(f"{path}: is no regular file")
    return file


def _read_small(path: Path, max_bytes: int) -> bytes:
    with _open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise VerificationError(f"{path}: is larger than anything of its kind, {max_bytes} bytes")
    return data


def _hash_file(path: Path) -> str:
    with _open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
