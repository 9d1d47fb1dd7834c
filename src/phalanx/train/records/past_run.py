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
from phalanx.config import digest_config
from phalanx.errors import CheckpointError, ConfigError
from phalanx.security.audit import KnownHead, verify_log
from phalanx.security.crypto import Peer, certificate_facts, read_public
from phalanx.train.config import load_run
from phalanx.train.records.audit_trail import LOG_FILE
from phalanx.train.records.history import read_history
from phalanx.train.records.run_directory import owner_certificate, run_name


class PastRun:
    """Another run, or this one after its end.

    Args:
        certificate: The owner's certificate, kept by the caller; the directory's own when left out, which finds
            every change but one that replaced log, checkpoints and certificate together.

    Attributes:
        policies: Digests of the policies that its sessions were begun under, from the log.
        released_digest: Digest in its log of the adapters that its enclave has let out; None where it let out none.
        verdicts: Bodies of the events `verdict` of its log, oldest first.
        final_weights_digest: Final digest in its log; None while it has not ended.
    """

    def __init__(self, path: Path, certificate: Path | None = None) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.run_id = run_name(path)
        self.config = load_run(path / "config.toml")
        self.owner = _read_owner(certificate or owner_certificate(path))
        history = read_history(path / LOG_FILE, self.owner, self.run_id)
        self._certified, self._configs = history.certified, history.configs
        self.policies = frozenset(history.policies)
        self.final_weights_digest = history.final_weights_digest
        self.released_digest = history.released_digest
        self.verdicts = [body for kind, body in history.decisions if kind == "verdict"]

    def key_holder(self) -> KeyHolder | None:
        """The holder of the key that unwraps its checkpoints; None when they are not encrypted."""
        key_file = self.config.checkpoint.key
        return None if key_file is None else open_key(key_file)

    @property
    def certified_steps(self) -> list[int]:
        """Steps of the checkpoints that should be on disk by the signed log, newest first."""
        return sorted(self._certified.saved, reverse=True)

    @property
    def best_step(self) -> int:
        """The step of the checkpoint with the best validation, by the signed log."""
        rule, best = self.config.checkpoint.best, self._certified.best
        if best is None:
            why = "the run file has no checkpoint.best" if rule is None else "none is saved yet, or it was undone"
            raise CheckpointError(f"{self.checkpoints}: no best checkpoint: {why}; choose one with --step")
        return best.step

    def open_verified(self, step: int | None = None, *, best: bool = False) -> Checkpoint:
        """Open and verify a checkpoint.

        Args:
            step: Step of the checkpoint; left out, the newest, which must be the one that the log knows.
            best: The one with the best validation is wanted.
        """
        if best and step is not None:
            raise ConfigError("--best and --step name two checkpoints; remove one of them")
        step = self.best_step if best else step
        if step is None:
            path = latest_checkpoint(self.checkpoints)
            step_found = None if path is None else step_of(path.name)
            self._certified.check_newest(
                step_found, None if path is None else manifest_digest(path), str(self.checkpoints)
            )
        else:
            path = self.checkpoints / step_directory(step)
        if path is None or not path.is_dir():
            raise CheckpointError(f"{path or self.checkpoints}: no checkpoint")
        if step is not None:
            self._certified.check_writing(step, manifest_digest(path), str(self.checkpoints))
        config = digest_config(self.config)
        configs = self._configs or {config}
        if config not in configs:
            raise CheckpointError(
                f"{self.path / 'config.toml'}: has config digest {config:.12}..., which no session of the run had; "
                "restore the file of the run"
            )
        checkpoint = open_checkpoint(path, self.owner, run=self.run_id, config_digest=configs, key=self.key_holder())
        if step is None and checkpoint.log_head is not None:
            known_log_heads = (KnownHead(checkpoint.log_head, str(path)),)
            verify_log(self.path / LOG_FILE, self.owner, run=self.run_id, known=known_log_heads)
        return checkpoint


def _read_owner(path: Path) -> Peer:
    peer = certificate_facts(read_public(path), str(path)).peer
    if peer is None:
        raise CheckpointError(f"{path}: is an authority's certificate, expected the owner's")
    return peer
