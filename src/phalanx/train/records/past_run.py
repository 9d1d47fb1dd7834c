"""A run directory seen from outside, by public keys alone: its config, and a checkpoint that its log certifies."""

from pathlib import Path

from phalanx.checkpoint import (
    Checkpoint,
    KeyHolder,
    latest_checkpoint,
    manifest_digest,
    open_checkpoint,
    open_key,
    step_directory,
    step_of,
)
from phalanx.config import digest
from phalanx.errors import CheckpointError
from phalanx.security.audit import KnownHead, verify_log
from phalanx.security.crypto import Peer, certificate_facts, read_public
from phalanx.train.config import load_run
from phalanx.train.records.audit_trail import LOG_FILE
from phalanx.train.records.history import read_history
from phalanx.train.records.run_directory import owner_certificate, run_name


class PastRun:
    """Another run, or this one after its end.

    Args:
        path: Its directory.
        certificate: The owner's certificate, kept by the caller; the directory's own when left out, which finds
            every change but one that replaced log, checkpoints and certificate together.

    Raises:
        CheckpointError: There is no run.
        ConfigError: Its config cannot be read.
        CertificateError: The certificate is unusable.
        AuditLogError: Its log is broken.

    Attributes:
        path: Its directory.
        config: What it trained.
        run_id: Its random name.
        owner: The party that must have signed everything.
        checkpoints: Directory of its checkpoints.
        verdicts: What the events `verdict` of its log say, oldest first.
        final_weights_digest: What its log says that it ended with; None while it has not ended.
    """

    def __init__(self, path: Path, certificate: Path | None = None) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.run_id = run_name(path)
        self.config = load_run(path / "config.toml")
        self.owner = _owner(certificate or owner_certificate(path))
        history = read_history(path / LOG_FILE, self.owner, self.run_id)
        self._certified = history.certified
        self.final_weights_digest = history.final_weights_digest
        self.verdicts = [body for kind, body in history.decisions if kind == "verdict"]

    def key(self) -> KeyHolder | None:
        """The holder of the key that unwraps its checkpoints; None when they are not encrypted.

        Raises:
            CheckpointError: The key is missing or malformed.
        """
        where = self.config.checkpoint.key
        return None if where is None else open_key(where)

    def open(self, step: int | None = None) -> Checkpoint:
        """Open and verify a checkpoint.

        Args:
            step: Of the one that is wanted; left out, the newest, which must be the one that the log knows.

        Raises:
            CheckpointError: There is none, or it is damaged, foreign, rolled back or of another config.
            AuditLogError: The newest one knows lines that the log does not have.
        """
        if step is None:
            path = latest_checkpoint(self.checkpoints)
            found = None if path is None else step_of(path.name)
            self._certified.check(found, None if path is None else manifest_digest(path), str(self.checkpoints))
        else:
            path = self.checkpoints / step_directory(step)
        if path is None or not path.is_dir():
            raise CheckpointError(f"{path or self.checkpoints}: there is no checkpoint")
        expected = digest(self.config)
        checkpoint = open_checkpoint(path, self.owner, run=self.run_id, config_digest=expected, key=self.key())
        if step is None and checkpoint.log_head is not None:
            known = (KnownHead(checkpoint.log_head, str(path)),)
            verify_log(self.path / LOG_FILE, self.owner, run=self.run_id, known=known)
        return checkpoint


def _owner(path: Path) -> Peer:
    peer = certificate_facts(read_public(path), str(path)).peer
    if peer is None:
        raise CheckpointError(f"{path}: is an authority's certificate, expected the owner's")
    return peer
