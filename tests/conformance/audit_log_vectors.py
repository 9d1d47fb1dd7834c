"""The examples of docs/audit_log.md, made by Phalanx from fixed keys; run as a program it writes them into the page."""

import hashlib
import json
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from phalanx.config import canonical_json
from phalanx.pipeline.proof.step_record import DrawLeaf, StateLeaf, write_leaf
from phalanx.pipeline.protocol.signed import to_signed
from phalanx.pipeline.verify.draw import AuditDraw
from phalanx.security.audit import PublicEntries
from phalanx.security.audit.head import sign_head
from phalanx.security.audit.leaves import merkle_root
from phalanx.security.audit.line import first_head, next_head, signed_part
from phalanx.security.audit.public_head import hashed_boot
from phalanx.security.crypto import Identity, digest_hex
from phalanx.transport.frame import HeaderFields, sign_header

PAGE = Path(__file__).resolve().parents[2] / "docs" / "audit_log.md"
OWNER = Identity("owner", Ed25519PrivateKey.from_private_bytes(b"\x01" * 32))
WORKER = Identity("worker-1", Ed25519PrivateKey.from_private_bytes(b"\x02" * 32))
RUN = "0123456789abcdef0123456789abcdef"
VALUES = [{"b": 1, "a": [True, None, 'ä\n\x1f\x7f"\\/']}, {"x": [0.1, 1.0, 1e-05, 1e16, -0.0, 123456789.125]}]


def vectors() -> dict:
    """Everything that the page shows."""
    return {
        "canonical": [{"value": value, "bytes": canonical_json(value).decode()} for value in VALUES],
        "log": _log(),
        "public_head": _public_head(),
        "merkle": [{"leaves": leaves, "root": merkle_root([leaf.encode() for leaf in leaves])} for leaves in _trees()],
        "header": _header(),
        "draw": _draw(),
    }


def _log() -> dict:
    head, lines = first_head(RUN), []
    for kind, body in (("awaiting", {"parties": ["wörker"]}), ("lost", {"party": "worker-1", "step": 3})):
        event = {
            "sequence": head.num_events,
            "time": "2026-01-02T03:04:05.000006Z",
            "run": RUN,
            "kind": kind,
            "body": body,
            "previous": head.digest,
        }
        event["signature"] = OWNER.sign_data(signed_part(event)).hex()
        lines.append(canonical_json(event))
        head = next_head(head, lines[-1])
    return {
        "public_key": OWNER.public.public_key.hex(),
        "lines": [line.decode() for line in lines],
        "digests": [digest_hex(line) for line in lines],
        "head": sign_head(OWNER, RUN, head),
    }


def _public_head() -> dict:
    lines, boot = PublicEntries(OWNER, RUN), "11111111-2222-3333-4444-555555555555"
    lines._boot = hashed_boot(RUN, boot)
    for kind, line in (("run_started", "a"), ("drift", "b"), ("step", "c")):
        lines.count_entry(kind, digest_hex(line.encode()))
        if kind == "drift":
            lines.note_forced(len(lines))
    head = lines.signed_public_head()
    return {"boot": boot, "head": None if head is None else head.model_dump(mode="json")}


def _trees() -> list[list[str]]:
    state = write_leaf(StateLeaf(stage=1, weights="ab" * 32, moments="cd" * 32)).decode()
    draw = write_leaf(DrawLeaf(stage=1, auditor="worker-2", microbatches=(0, 5), whole=False)).decode()
    return [[], [""], [state], [state, draw], ["a", "b", "c"], ["a", "b", "c", "d", "e", "f", "g"]]


def _header() -> dict:
    body = {"epoch": 0, "step": 3, "source": 1, "microbatch": 5, "direction": "forward"}
    fields = HeaderFields(f"{RUN}-1", "tensor", "worker-1", "worker-2", 7, "00" * 32, 0, digest_hex(), body)
    signed = sign_header(WORKER, fields)
    return {
        "public_key": WORKER.public.public_key.hex(),
        "signed": to_signed(signed).model_dump(),
        "digest": signed.header_digest,
    }


def _draw() -> dict:
    key, nonce = bytes(range(32)), bytes(range(32, 64))
    draw = AuditDraw(key, nonce, 0.375, step_rate=0.5, owner_rate=0.5)
    places = [{"step": step, "epoch": 0, "stage": stage} for step in (0, 3) for stage in (1, 2)]
    return {
        "key": key.hex(),
        "nonce": nonce.hex(),
        "commitment": hashlib.sha256(key).hexdigest(),
        "guard": {"audit_rate": 0.375, "step_audit_rate": 0.5, "owner_audit_rate": 0.5},
        "places": [
            {
                **place,
                "microbatches_of_8": list(draw.draw_microbatches(**place, num_microbatches=8)),
                "microbatches_of_5": list(draw.draw_microbatches(**place, num_microbatches=5)),
                "whole_step": draw.draws_whole_step(**place),
                "owners_step": draw.draws_owner_audit(**place),
            }
            for place in places
        ],
    }


def on_page() -> dict:
    """What the page has."""
    found: dict = json.loads(PAGE.read_text(encoding="utf-8").partition("```json\n")[2].partition("\n```")[0])
    return found


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    start = text.index("## Examples")
    head = text[start:].partition("\n\n")[0] + "\n\n" + text[start:].split("\n\n")[1]
    block = json.dumps(vectors(), indent=1, ensure_ascii=False)
    PAGE.write_text(text[:start] + head + f"\n\n```json\n{block}\n```\n", encoding="utf-8")
