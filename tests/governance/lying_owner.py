"""An owner that changes what its run has left and signs all of it anew: log, leaves, manifests and publication."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from phalanx.checkpoint.manifest import CheckpointManifest, FileEntry, sign_manifest
from phalanx.config import canonical_json
from phalanx.governance import publication as form
from phalanx.security.audit import HeadEntry, LeafBatch, LogEntry, LogHead, read_batch
from phalanx.security.audit.head import sign_head
from phalanx.security.audit.leaves import merkle_root
from phalanx.security.audit.line import first_head, next_head, signed_part
from phalanx.security.crypto import in_domain, load_identity, parse_canonical

ChangeBody = Callable[[str, dict[str, Any]], dict[str, Any]]
ChangeLeaf = Callable[[int, dict[str, Any]], dict[str, Any]]


def keep_body(kind: str, body: dict[str, Any]) -> dict[str, Any]:
    return body


def keep_leaf(step: int, leaf: dict[str, Any]) -> dict[str, Any]:
    return leaf


class LyingOwner:
    """Has a run directory with all keys of the owner."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.identity = load_identity(home / "pki" / "owner")
        self._heads: dict[int, LogHead] = {}

    def change_tensor(self, step: int, stage: int, name: str, add: float = 2**-10) -> None:
        """Change one number of a state on disk; `sign_anew` makes it the certified one."""
        path = self.home / "checkpoints" / f"step-{step:08}" / f"stage-{stage}.safetensors"
        tensors = load_file(path)
        name = next(key for key in sorted(tensors) if key.startswith(name))
        tensors[name].view(-1)[0] += torch.tensor(add, dtype=tensors[name].dtype)
        save_file(tensors, path)

    def change_state(self, step: int, change: Callable[[dict[str, Any]], None]) -> None:
        path = self.home / "checkpoints" / f"step-{step:08}" / "state.json"
        state = json.loads(path.read_bytes())
        change(state)
        path.write_bytes(canonical_json(state))

    def insert_line(self, kind: str, body: dict[str, Any], behind: str = "run_started") -> None:
        """Put a line into the log, behind the first one of a kind; `sign_anew` signs it."""
        path = self.home / "events.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        place = next(number for number, line in enumerate(lines, 1) if line["kind"] == behind)
        lines.insert(place, {**lines[place - 1], "kind": kind, "body": body})
        path.write_bytes(b"".join(canonical_json({**line, "sequence": n}) + b"\n" for n, line in enumerate(lines)))

    def sign_anew(self, change_body: ChangeBody = keep_body, change_leaf: ChangeLeaf = keep_leaf) -> None:
        """Write log, leaves, manifests and summary again, so that every signature and digest holds."""
        lines = [json.loads(line) for line in (self.home / "events.jsonl").read_text().splitlines()]
        run, leaves_path = lines[0]["run"], self.home / "steps.jsonl"
        head, old, log, leaves = first_head(run), first_head(run), b"", b""
        self._heads = {0: head}
        for line in lines:
            kind, body = line["kind"], change_body(line["kind"], line["body"])
            old = next_head(old, canonical_json(line))
            if kind == "step":
                entry = LogEntry(line["sequence"], line["time"], run, kind, line["body"], head=old, size_bytes=0)
                batch = LeafBatch.from_log_entry(entry)
                changed = [
                    canonical_json(change_leaf(body["step"], json.loads(leaf)))
                    for leaf in read_batch(leaves_path, batch)
                ]
                data = b"".join(leaf + b"\n" for leaf in changed)
                body = {**body, "root": merkle_root(changed), "offset": len(leaves), "size_bytes": len(data)}
                leaves += data
            elif kind == "checkpoint_saved":
                body = {**body, "manifest": self._sign_manifest(body["step"]) or body["manifest"]}
            event = {**line, "body": body, "previous": head.digest}
            event["signature"] = self.identity.sign_data(signed_part(event)).hex()
            text = canonical_json(event)
            log += text + b"\n"
            head = next_head(head, text)
            self._heads[head.num_events] = head
        (self.home / "events.jsonl").write_bytes(log)
        leaves_path.write_bytes(leaves)
        summary = json.loads((self.home / "summary.json").read_bytes())
        summary["audit_log_head"] = {"num_events": head.num_events, "digest": head.digest}
        summary["audit_log_head_signed"] = sign_head(self.identity, run, head)
        (self.home / "summary.json").write_text(json.dumps(summary))

    def _sign_manifest(self, step: int, **changes: Any) -> str | None:
        path = self.home / "checkpoints" / f"step-{step:08}"
        if not path.exists():
            return None
        body = json.loads((path / "manifest.json").read_bytes())["body"]
        manifest = CheckpointManifest.model_validate_json(canonical_json(body))
        files = {
            name: FileEntry(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
            for name in manifest.files
            for data in [(path / name).read_bytes()]
        }
        number = 0 if manifest.audit_log is None else manifest.audit_log.num_events
        known = self._heads[number]
        log_head = HeadEntry(num_events=known.num_events, digest=known.digest)
        content = sign_manifest(
            manifest.model_copy(update={"files": files, "audit_log": log_head, **changes}), self.identity
        )
        (path / "manifest.json").write_bytes(content)
        return hashlib.sha256(content).hexdigest()


def sign_publication(home: Path, owner: LyingOwner, **changes: Any) -> None:
    """Sign a publication again as it is now, with other values of the manifest."""
    path = home / form.PUBLICATION_FILE
    body = parse_canonical(path.read_bytes())["body"]
    files = {
        name: {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name in (p.relative_to(home).as_posix() for p in sorted(home.rglob("*")) if p.is_file())
        if name != form.PUBLICATION_FILE
        for data in [(home / name).read_bytes()]
    }
    body |= {"files": files, **changes}
    signatures = owner.identity.signature_fields(in_domain("publication/1", canonical_json(body)))
    path.write_bytes(canonical_json({"body": body, **signatures}))
