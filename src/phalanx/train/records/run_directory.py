"""A run's directory: identities, logs, metrics, checkpoints, and the start of a resumed run."""

import contextlib
import json
import os
import secrets
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.closing import Closeable
from phalanx.config import KEPT_CODE, changed_code, digest_config, dump_toml, source_files
from phalanx.data.normal_form import is_text
from phalanx.errors import CheckpointError, ConfigError, writing_cure
from phalanx.pipeline.config import OWNER
from phalanx.security.crypto import Identity, create_authority, issue_certificate, load_identity
from phalanx.train.config import RunConfig, load_run
from phalanx.train.records.run_changes import RunChanges, changes_between
from phalanx.train.records.unstarted import claim_directory, free_directory, is_unstarted

_RECORD, _SUMMARY, _BEGUN = "run.json", "summary.json", ".begun"
ADDRESS_FILE = "address"
ATTACK_LOG = "attack.jsonl"
"""File in which attackers of a drill record their lies."""
OWNER_CERTIFICATE = "owner.pem"
"""A copy of the owner's certificate, wherever its keys are."""

ADAPTERS = "adapters.safetensors"
"""File of the adapters that the enclave of a split has let out."""
HEAD_FILE = Path("secrets") / "audit.head"
_OWN_NAMES = ("config.toml", "pki", "secrets", "events.jsonl", "steps.jsonl", "metrics.jsonl", "checkpoints", _SUMMARY)


def cache_beside(run_dir: Path) -> Path:
    """Where prepared text and converted models are kept: ``PHALANX_CACHE``, or ``.cache`` beside the run."""
    return Path(os.environ.get("PHALANX_CACHE", run_dir.parent / ".cache"))


def kept_preparations(run_dir: Path) -> str:
    """Describe the rest of an interrupted preparation, and how to continue it."""
    return (
        f"finished preparations are in {shlex.quote(str(cache_beside(run_dir)))} and are reused; repeat the same "
        "command"
    )


def default_directory(run: RunConfig) -> Path:
    """The directory of a run where the user names none."""
    return Path("runs") / run.name


def owner_certificate(run_dir: Path) -> Path:
    """Where the owner's certificate is; in runs of before this version, where the keys are."""
    candidates = (run_dir / OWNER_CERTIFICATE, run_dir / "pki" / OWNER / "certificate.pem")
    # a pipe in their place would make the reader wait for ever
    existing = next((path for path in candidates if path.is_file()), None)
    if existing is not None or not (run_dir / "config.toml").is_file():
        return existing or candidates[0]
    pki = load_run(run_dir / "config.toml").pki
    return candidates[0] if pki is None else Path(pki) / OWNER / "certificate.pem"


def holds_run(run_dir: Path) -> bool:
    """Whether there is a run to go on with: one that has finished a step; any other is begun anew."""
    return (run_dir / _RECORD).exists() and not is_unstarted(run_dir)


def is_made(run_dir: Path) -> bool:
    """Whether a run's directory is there, with its keys, whatever the run has done."""
    return (run_dir / _RECORD).exists()


def run_name(run_dir: Path) -> str:
    """Return the random name of the run in a directory."""
    try:
        return str(json.loads((run_dir / _RECORD).read_text(encoding="utf-8"))["run"])
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise CheckpointError(f"{run_dir / _RECORD}: cannot be read; expected the directory of a run").with_facts(
            code="PHX-I051",
            file=str(run_dir),
            key="--from",
            found="no readable record",
            expected="the directory of a run",
            do="give the run directory that phalanx train printed",
        ) from exc


def check_directory(run_dir: Path, *, resume: bool) -> None:
    """Refuse what `RunDirectory` would, as far as it can be seen without the run; nothing is touched."""
    try:
        if run_dir.exists() and not run_dir.is_dir():
            raise _not_usable(run_dir, "File exists")
        if resume and not any((run_dir / name).exists() for name in (_RECORD, _BEGUN)):
            raise _nothing_to_resume(run_dir)
        if not resume and holds_run(run_dir):
            raise _holds_run(run_dir)
    except OSError as exc:
        raise _not_usable(run_dir, exc.strerror or "unknown") from exc


def _not_usable(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path}: cannot be used as a run directory ({why}); choose another --run-dir").with_facts(
        code="PHX-C013",
        file=str(path),
        key="--run-dir",
        found=why,
        expected="a directory",
        do="choose another --run-dir",
    )


def _nothing_to_resume(run_dir: Path) -> CheckpointError:
    return CheckpointError(f"{run_dir}: no run to resume; start it without --resume").with_facts(
        code="PHX-I051",
        file=str(run_dir),
        key="--resume",
        found="no run",
        expected="the directory of a run",
        do="start it without --resume",
    )


def _holds_run(run_dir: Path) -> ConfigError:
    return ConfigError(
        f"{run_dir}: already has a run; add --resume to continue it, or choose another --run-dir"
    ).with_facts(
        code="PHX-C012",
        file=str(run_dir),
        key="--run-dir",
        found="a run",
        expected="a directory without a run",
        do="add --resume, or choose another --run-dir",
    )


class RunDirectory(Closeable):
    """Paths and identities of one run.

    Attributes:
        begun_anew: Whether an earlier start was here that had not finished a step.
        changes: Changes of a resumed run to its run file, until `keep_changes`; None where there are none.
    """

    def __init__(self, path: Path, run: RunConfig, *, resume: bool, parties: Sequence[str] | None = None) -> None:
        """Make the directory of a new run, or open that of a run to resume.

        A directory of a run that has not finished a step is made free and filled anew, keys included.

        Args:
            parties: Names that get keys beside the owner's; those of the run file when left out.

        Raises:
            ConfigError: It holds a run already and `resume` is false, or another run than this one with other
                differences than a resumed run may have; or another process begins one there.
        """
        self.path = path
        self._run = run
        self._parties = run.workers if parties is None else tuple(parties)
        self._claim: int | None = None
        self.begun_anew = False
        self.changes: RunChanges | None = None
        record = path / _RECORD
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            try:
                is_there = resume and record.exists()
                self.run_id = self._check_record(record) if is_there else self._prepare_directory(record, resume)
            except OSError as exc:
                raise _not_usable(path, exc.strerror or "unknown") from exc
            self.owner: Identity = load_identity(self.pki_directory / OWNER)
            self._leave_certificate()
            for name in run.certified_elsewhere:
                # before anything that takes long: what is missing has to be asked for on another machine
                self.read_certificate(name)
            on_failure.pop_all()

    def close(self) -> None:
        """Let another process begin a run here; one that has an audit log is guarded by the log's own lock."""
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    @property
    def pki_directory(self) -> Path:
        """Directory of the authority and the identities."""
        return self.path / "pki" if self._run.pki is None else Path(self._run.pki)

    @property
    def cache_directory(self) -> Path:
        """Prepared text and converted models, shared by the runs beside this one."""
        return cache_beside(self.path)

    @property
    def checkpoint_directory(self) -> Path:
        """Directory of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def journal_directory(self) -> Path:
        """Directory of the journal and of the states that processes keep beside it."""
        return self.path / "journal"

    @property
    def attack_log(self) -> Path:
        """Return the file in which attackers of a drill write their lies."""
        return self.path / ATTACK_LOG

    def read_certificate(self, name: str) -> str:
        """PEM of one party."""
        path = self.pki_directory / name / "certificate.pem"
        if not path.exists():
            raise ConfigError(
                f"{path}: missing; let {name} make keys and a request with `phalanx pki request {name}`, and sign "
                f"it with `phalanx pki sign {shlex.quote(str(self.pki_directory))} request.csr`; if that directory "
                "was moved away, copy its certificate.pem back"
            )
        return path.read_text(encoding="ascii")

    def audit_key(self) -> bytes:
        """The owner's secret that decides audits; one for all sessions of a run, until it is revealed."""
        path = self._audit_key_file
        if not path.exists():
            path.parent.mkdir(mode=0o700, exist_ok=True)
            temporary = path.with_suffix(".tmp")
            temporary.unlink(missing_ok=True)
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(secrets.token_bytes(32))
            temporary.rename(path)
        return path.read_bytes()

    def forget_audit_key(self) -> None:
        """The key is no secret any more: the next session draws with another one."""
        self._audit_key_file.unlink(missing_ok=True)

    @property
    def kept_head(self) -> Path:
        """The file that keeps the head of the audit log, as it is on the disk at least."""
        return self.path / HEAD_FILE

    @property
    def secrets_directory(self) -> Path:
        """The directory of the owner's secrets of this run."""
        return self.path / "secrets"

    @property
    def _audit_key_file(self) -> Path:
        return self.secrets_directory / "audit.key"

    def announce_address(self, address: str) -> None:
        """Write down where the owner listens, for the user or engine that starts its workers."""
        temporary = self.path / f".{ADDRESS_FILE}.tmp"
        temporary.write_text(f"{address}\n", encoding="ascii")
        temporary.rename(self.path / ADDRESS_FILE)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write ``summary.json`` in one go."""
        temporary = self.path / ".summary.json.tmp"
        try:
            temporary.write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n", encoding="utf-8")
            temporary.rename(self.path / _SUMMARY)
        except OSError as exc:
            raise CheckpointError(f"{self.path / _SUMMARY}: cannot be written ({exc.strerror})") from exc

    def read_summary(self) -> dict[str, Any] | None:
        """Read the summary of an earlier session; None when there is nothing readable."""
        try:
            summary = json.loads((self.path / _SUMMARY).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return summary if isinstance(summary, dict) else None

    def remove_summary(self) -> None:
        """Forget what an earlier session left."""
        (self.path / _SUMMARY).unlink(missing_ok=True)

    def _leave_certificate(self) -> None:
        """Leave the owner's certificate: an auditor of the log needs nothing but this directory."""
        path = self.path / OWNER_CERTIFICATE
        if not path.exists():
            temporary = path.with_suffix(".tmp")
            temporary.write_bytes(self.owner.certificate_pem)
            temporary.rename(path)

    def _check_creation(self, resume: bool) -> None:
        """Only a new directory is filled, or one in which a crash interrupted just that."""
        begun = (self.path / _BEGUN).exists()
        if resume and not begun:
            raise _nothing_to_resume(self.path)
        if not is_text(str(self.path.absolute())):
            # logs and records could not hold it
            raise _not_usable(self.path, "its name is not UTF-8")
        foreign = sorted(name for name in _OWN_NAMES if (self.path / name).exists())
        if foreign and not begun:
            raise ConfigError(
                f"{self.path}: has {', '.join(foreign)} but no {_RECORD}, so it is not a run; choose another --run-dir"
            ).with_facts(code="PHX-C013", file=str(self.path), do="choose another --run-dir")

    def _prepare_directory(self, record: Path, resume: bool) -> str:
        if not record.exists():
            self._check_creation(resume)
        self.path.mkdir(parents=True, exist_ok=True)
        self._claim = claim_directory(self.path)
        if record.exists():
            self.begun_anew = free_directory(self.path)
            if not self.begun_anew:
                raise _holds_run(self.path)
        self._check_creation(resume)
        return self._create_run(record)

    def _create_run(self, record: Path) -> str:
        begun = self.path / _BEGUN
        begun.touch()
        self._write_config()
        if self._run.pki is None:
            # a crash in the middle leaves no record, so what it made is made anew
            shutil.rmtree(self.pki_directory, ignore_errors=True)
            create_authority(self.pki_directory)
            self._certify_parties(OWNER, *self._parties)
        self._keep_code()
        run_id = secrets.token_hex(16)
        self._write_record(record, run_id)
        begun.unlink()
        return run_id

    def _certify_parties(self, *names: str) -> None:
        """Issue certificates to parties that have none, by the run's own authority."""
        for name in names:
            if not (self.pki_directory / name / "certificate.pem").exists():
                # a crash may have come between key and certificate
                shutil.rmtree(self.pki_directory / name, ignore_errors=True)
                issue_certificate(self.pki_directory, name)

    def _keep_code(self) -> None:
        """Keep each file of the user's own code, by its digest: the resolved run file finds it here."""
        for name, content in source_files(self._run.own_code):
            folder = self.path / KEPT_CODE
            folder.mkdir(exist_ok=True)
            (folder / f"{name}.py").write_bytes(content)

    def _check_code(self) -> None:
        """Refuse code of the user's own that has changed since the run began."""
        try:
            existing_run = load_run(self.path / "config.toml")
        except ConfigError:
            return
        changed = changed_code(existing_run.own_code, self._run.own_code)
        if changed is not None:
            raise ConfigError(
                f"{self.path}: {changed}; restore it ({self.path / KEPT_CODE} has a copy of each file), or begin a "
                f"new run from its weights: --from {self.path} with another --run-dir"
            )

    def keep_changes(self) -> None:
        """Make the run file that this run is resumed with the one of its directory."""
        try:
            self._write_config()
            self._write_record(self.path / _RECORD, self.run_id)
        except OSError as exc:
            raise CheckpointError(f"{self.path}: cannot be written ({exc.strerror}); {writing_cure(exc)}") from exc
        self.changes = None

    def _write_config(self) -> None:
        text, path = f"# digest {digest_config(self._run)}\n{dump_toml(self._run)}", self.path / "config.toml"
        if not path.exists() or path.read_text(encoding="utf-8", errors="replace") != text:
            temporary = self.path / ".config.toml.tmp"
            temporary.write_text(text, encoding="utf-8")
            temporary.rename(path)

    def _write_record(self, record: Path, run_id: str) -> None:
        temporary = self.path / f".{_RECORD}.tmp"
        temporary.write_text(json.dumps({"run": run_id, "config_digest": digest_config(self._run)}), encoding="utf-8")
        temporary.rename(record)

    def _check_record(self, record: Path) -> str:
        try:
            record_values = json.loads(record.read_text(encoding="utf-8"))
            run_id, config_digest = str(record_values["run"]), record_values["config_digest"]
        except (ValueError, KeyError, TypeError) as exc:
            raise CheckpointError(f"{record}: is damaged; start a new run in another directory") from exc
        if config_digest == digest_config(self._run):
            # a crash may have come between the two files of `keep_changes`
            self._write_config()
            return run_id
        if is_unstarted(self.path):
            raise ConfigError(
                f"{self.path}: its run finished no step, so there is nothing to resume; start without --resume to "
                "begin again with this run file"
            ).with_facts(code="PHX-C014", file=str(self.path), do="start it without --resume")
        self._check_code()
        self.changes = changes_between(self._config_there(config_digest), self._run, str(self.path))
        if self._run.pki is None:
            # workers of a new cut; the owner's keys are never made anew
            self._certify_parties(*self._parties)
        return run_id

    def _config_there(self, config_digest: str) -> RunConfig:
        """Read `config.toml`, which may be one write ahead of the record after a crash."""
        path = self.path / "config.toml"
        try:
            return load_run(path)
        except ConfigError as exc:
            raise ConfigError(
                f"{self.path}: holds another run (config digest {config_digest[:12]}..., this run file has "
                f"{digest_config(self._run)[:12]}...), and the different keys are unknown: {exc}; resume with the "
                "same run file"
            ).with_facts(code="PHX-C016", file=str(self.path)) from exc
