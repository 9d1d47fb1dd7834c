"""A run that has not finished a step: how one is told from others, and how its directory is made free again."""

import contextlib
import fcntl
import json
import os
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

from phalanx.errors import ConfigError

LOCK_FILE = ".lock"
MIDDLE = "middle"
"""Directory, inside that of the run, where an enclave that owns a pipeline has its log, its evidence and its keys."""
_GROW_WITH_STEPS = ("metrics.jsonl", "steps.jsonl")
_FILLED_BY_STEPS = ("checkpoints", "evidence", "journal")
_LOG = "events.jsonl"
_MAX_LOG_BYTES = 1 << 20
"""A log of a run without a step is far shorter."""

_BEFORE_A_STEP = {
    *("run_started", "run_resumed", "run_stopped", "log_healed", "audit_key_revealed", "adopted"),
    *("awaiting", "party_joined", "not_let_in", "log_head_ignored", "guarantees", "lost", "left"),
    *("round_begun", "enclave_appraised", "client_appraised", "client_evidence_refused", "memory_short"),
}
"""Kinds of events that say nothing of a finished step and convict no party."""

_NAMES = (
    *("config.toml", "run.json", "owner.pem", "summary.json", "report.html", "address", "attack.jsonl", "peers.json"),
    *(_LOG, *_GROW_WITH_STEPS, *_FILLED_BY_STEPS, "kept_model"),
    *("pki", "secrets", "tensorboard", "tracking", "code", "clients", "enclave", MIDDLE, "transcript.json"),
    *("post_mortem.md", "post_mortem.html", "stacks.json"),
)
"""What a run leaves behind before its first step; its processes' logs stay, where they meet as well."""


def is_unstarted(run_dir: Path) -> bool:
    """Whether the run in a directory has no finished step, no checkpoint, no evidence and no decision about a party.

    Guarantees:
        What cannot be read counts as a step.
    """
    try:
        grown = any((run_dir / name).exists() and (run_dir / name).stat().st_size for name in _GROW_WITH_STEPS)
        filled = any((run_dir / name).is_dir() and any((run_dir / name).iterdir()) for name in _FILLED_BY_STEPS)
        decided = any(kind not in _BEFORE_A_STEP for kind in _event_kinds(run_dir / _LOG))
        # what an enclave knows of its stages may be ahead of what the owner of the run was told
        middle = run_dir / MIDDLE
        return not (grown or filled or decided) and (not middle.exists() or is_unstarted(middle))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def free_directory(run_dir: Path) -> bool:
    """Remove the files of a run without a finished step from its directory; leave any other run as it is.

    Returns:
        Whether it was removed.
    """
    with _hold_log_lock(run_dir / _LOG):
        if not is_unstarted(run_dir):
            return False
        kept_names = {"pki"} if _has_keys_of_its_own(run_dir) else set()
        # the record goes first: a crash from here on leaves no run that lacks its keys
        for name in sorted(set(_NAMES) - kept_names, key=lambda name: name != "run.json"):
            path = run_dir / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        return True


def claim_directory(run_dir: Path) -> int:
    """Have a directory to this process alone while a run is begun in it, until the descriptor is closed."""
    handle = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock_file(handle, run_dir)
    except ConfigError:
        os.close(handle)
        raise
    return handle


@contextlib.contextmanager
def _hold_log_lock(log: Path) -> Iterator[None]:
    """Hold the lock that a running session has on its log, if there is one."""
    if not log.exists():
        yield
        return
    handle = os.open(log, os.O_RDWR | os.O_CLOEXEC)
    try:
        _lock_file(handle, log.parent)
        yield
    finally:
        os.close(handle)


def _lock_file(handle: int, run_dir: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        raise ConfigError(
            f"{run_dir}: another process uses it; wait for its end, or choose another --run-dir"
        ).with_facts(code="PHX-C015", file=str(run_dir)) from exc


def _has_keys_of_its_own(run_dir: Path) -> bool:
    """Whether the run's keys were made by ``phalanx pki``, and may lie in this very directory."""
    try:
        config = tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8"))
        return "pki" in config.get("pipeline", {})
    except (OSError, ValueError, AttributeError):
        return True


def _event_kinds(log: Path) -> Iterator[str]:
    if not log.exists():
        return
    if log.stat().st_size > _MAX_LOG_BYTES:
        raise ValueError(f"{log}: exceeds the size limit")
    for row in log.read_bytes().splitlines():
        yield json.loads(row)["kind"]
