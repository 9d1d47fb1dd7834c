"""A second reader of audit logs, written from docs/audit_log.md alone; nothing of Phalanx is imported here.

python tests/conformance/independent_verifier.py RUN_DIR [OWNER_CERTIFICATE]
"""

# a program of its own, to be read beside the page: it prints, and refuses where it finds
# ruff: noqa: T201, TRY301

import hashlib
import hmac
import json
import math
import re
import sys
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from blake3 import blake3
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

LINE_KEYS = {"sequence", "time", "run", "kind", "body", "previous", "signature"}


class RefusedError(Exception):
    """The log does not hold; the message says where."""


@dataclass
class Findings:
    """What was found: `proven` steps, `recorded` ones, audits under two signatures, and what could not be shown."""

    lines: int = 0
    guarded: bool = False
    recorded: set = field(default_factory=set)
    proven: set = field(default_factory=set)
    audits: int = 0
    completed: bool = False
    doubts: list = field(default_factory=list)


# --- canonical JSON, digests, signatures ---------------------------------------------------------


def canonical(value) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def parse(data: bytes) -> dict:
    value = json.loads(data.decode("utf-8"))
    if not isinstance(value, dict) or canonical(value) != data:
        raise ValueError("not one object in canonical form")
    return value


def digest(data: bytes) -> str:
    return blake3(data).hexdigest()


def in_domain(domain: str, data: bytes) -> bytes:
    return b"phalanx/" + domain.encode() + b"\x00" + data


def check_signature(key: bytes, signature: str, domain: str, data: bytes) -> None:
    if re.fullmatch("[0-9a-f]{128}", signature) is None:
        raise ValueError("a signature is 128 lowercase hex characters")
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(bytes.fromhex(signature), in_domain(domain, data))
    except InvalidSignature:
        raise ValueError("the signature does not hold") from None


def check_head(key: bytes, head: dict) -> None:
    check_signature(
        key, head["signature"], "log-head/1", canonical({k: head[k] for k in ("digest", "num_events", "run")})
    )


def merkle_root(leaves: list) -> str:
    def subtree(part):
        if len(part) == 1:
            return blake3(b"\x00" + part[0]).digest()
        k = 1
        while k * 2 < len(part):
            k *= 2
        return blake3(b"\x01" + subtree(part[:k]) + subtree(part[k:])).digest()

    return subtree(leaves).hex() if leaves else digest(b"")


def party_of(pem: str) -> tuple:
    """Name and message key of a certificate, and the certificate."""
    certificate = x509.load_pem_x509_certificate(pem.encode())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
    name, key = re.fullmatch(r"phalanx://([a-z0-9-]+)\?ed25519=([0-9a-f]{64})", uri).groups()
    return name, bytes.fromhex(key), certificate


# --- the draw -----------------------------------------------------------------------------------------


class Draw:
    def __init__(self, key: bytes, nonce: bytes, guard: dict):
        self.session_key = hmac.new(key, b"phalanx draws/1 " + nonce, hashlib.sha256).digest()
        self.guard = guard

    def number(self, *where) -> int:
        return int.from_bytes(hmac.new(self.session_key, canonical(list(where)), hashlib.sha256).digest()[:8], "big")

    def coin(self, *where) -> float:
        return self.number(*where) / 2**64

    def microbatches(self, t: int, e: int, s: int, m: int) -> list:
        if self.guard.get("min_audits", 1) == 0 and self.coin(t, e, s, -7) >= self.guard["audit_rate"] * m:
            return []
        c = math.ceil(self.guard["audit_rate"] * m)
        edges = [round(n * m / c) for n in range(c + 1)]
        return [edges[n] + self.number(t, e, s, n) % (edges[n + 1] - edges[n]) for n in range(c)]


# --- one step -------------------------------------------------------------------------------------------


class Step:
    def __init__(self, leaves: list, opening: dict, keys: dict, draw):
        self.opening, self.keys, self.draw, self.guard = opening, keys, draw, opening["guard"]
        self.by_kind = {}
        for leaf in leaves:
            self.by_kind.setdefault(leaf["leaf"], []).append(leaf)
        (self.attempt,) = self.by_kind["attempt"]
        self.t, self.e = self.attempt["step"], self.attempt["epoch"]
        self.holder = {int(s): pair[0] for s, pair in self.attempt["stages"].items()}
        self.shadow = {int(s): pair[1] for s, pair in self.attempt["stages"].items() if pair[1] is not None}
        self.m = opening["microbatches"]
        self.classes = self.guard["classes"]
        if self.attempt["classes"] and self.classes == "one":
            raise RefusedError("somebody is of another class than the run's")

    def same(self, one, other="owner"):
        return self.attempt["classes"].get(one, 0) == self.attempt["classes"].get(other, 0)

    def bits_decide(self, one, other):
        return self.classes != "mixed" and self.same(one, other)

    def check(self) -> int:
        self.check_cover()
        self.reports = {(a["stage"], a["microbatch"], a["auditor"]): a for a in self.by_kind.get("audit", ())}
        self.wholes = {(a["stage"], a["auditor"]) for a in self.by_kind.get("step_audit", ())}
        self.owned = {a["stage"] for a in self.by_kind.get("owner_audit", ())}
        asked = set()
        for leaf in self.by_kind.get("draw", ()):
            asked |= {(leaf["stage"], m, leaf["auditor"]) for m in leaf["microbatches"]}
            self.demand(leaf["stage"], leaf["auditor"], leaf["microbatches"], leaf["whole"])
        if self.draw is not None and self.guard["mode"] == "phalanx":
            self.redraw(asked)
        for leaf in self.by_kind.get("step_audit", ()):
            self.check_whole(leaf)
        return sum(self.check_audit(leaf) for leaf in self.reports.values())

    def check_cover(self):
        commits = {c["stage"]: c["party"] for c in self.by_kind.get("commit", ())}
        states = {s["stage"] for s in self.by_kind.get("state", ())}
        if set(self.holder) != set(range(len(self.opening["stages"]))):
            raise RefusedError("a stage is missing")
        for s, holder in self.holder.items():
            if holder != "owner" and (s not in self.shadow or s not in states):
                raise RefusedError(f"stage {s} is not watched")
            if commits.get(s) != holder:
                raise RefusedError(f"stage {s} has no commitment")

    def demand(self, s, auditor, microbatches, whole):
        for m in microbatches:
            if (s, m, auditor) not in self.reports:
                raise RefusedError(f"stage {s}, microbatch {m}: drawn and not audited")
        if whole and (s, auditor) not in self.wholes:
            raise RefusedError(f"stage {s}: weight gradient drawn and not audited")

    def redraw(self, asked):
        for s in sorted(self.shadow):
            if s not in self.owned and self.draw.coin(self.t, self.e, s, -2) < self.guard["owner_audit_rate"]:
                raise RefusedError(f"stage {s}: the owner's audit was drawn and not made")
            if self.holder[s] != "owner":
                microbatches, whole = self.drawn(s)
                if not {(s, m, self.shadow[s]) for m in microbatches} <= asked:
                    raise RefusedError(f"stage {s}: another draw than the key's")
                self.demand(s, self.shadow[s], microbatches, whole)

    def drawn(self, s):
        t, e, shadow = self.t, self.e, self.guard["shadow"]
        whole = shadow != "lockstep" and self.draw.coin(t, e, s, -1) < self.guard["step_audit_rate"]
        everything = whole or shadow == "lockstep"
        return list(range(self.m)) if everything else self.draw.microbatches(t, e, s, self.m), whole

    def check_audit(self, leaf) -> int:
        s, m, auditor = leaf["stage"], leaf["microbatch"], leaf["auditor"]
        server = self.holder[s]
        if leaf["report"] is None:
            if auditor != "owner":
                raise RefusedError(f"stage {s}, microbatch {m}: the report is not signed")
            got = leaf["digests"]
        else:
            got = self.opened(leaf["report"], auditor, "audit_report", stage=s, microbatch=m)["body"]["digests"]
        if set(got) != {"forward", "backward"}:
            raise RefusedError(f"stage {s}, microbatch {m}: half an audit")
        for direction, output in zip(("forward", "backward"), leaf["outputs"], strict=True):
            if output is None:
                if server != "owner":
                    raise RefusedError(f"stage {s}, microbatch {m}: what was sent is not shown")
                continue
            sent = self.opened(output, server, "tensor", source=s, microbatch=m, direction=direction)
            if sent["payload_digest"] != got[direction] and self.bits_decide(auditor, server):
                raise RefusedError(f"stage {s}, microbatch {m}: the digests differ")
        return leaf["report"] is not None

    def check_whole(self, leaf):
        s, auditor = leaf["stage"], leaf["auditor"]
        if leaf["commit"] is None or (leaf["report"] is None and auditor != "owner"):
            raise RefusedError(f"stage {s}: a weight gradient is not signed")
        said = self.opened(leaf["commit"], self.holder[s], "commit", stage=s)["body"]
        got = leaf
        if leaf["report"] is not None:
            got = self.opened(leaf["report"], auditor, "step_audited", stage=s)["body"]
        differ = (got["gradient"], got["norm_squared"]) != (said["gradient"], said["norm_squared"])
        if differ and self.bits_decide(auditor, self.holder[s]):
            raise RefusedError(f"stage {s}: the weight gradients differ")

    def opened(self, signed, party, kind, **place):
        text = signed["header"].encode()
        header = parse(text)
        check_signature(self.keys[party.partition(".")[0]], signed["signature"], "frame/1", text)
        expected = {"step": self.t, "epoch": self.e, **place}
        said = {name: header["body"].get(name) for name in expected}
        if (header["sender"], header["kind"], header["run"], said) != (party, kind, self.attempt["session"], expected):
            raise RefusedError(f"{party} signed this {kind} for something else")
        return header


# --- the whole log ------------------------------------------------------------------------------------------


def read_lines(path: Path, key: bytes) -> list:
    """Every line with its digest, checked; the first broken one is refused with its number."""
    data = path.read_bytes()
    rows = data.split(b"\n")
    if rows.pop():
        raise RefusedError(f"line {len(rows) + 1} is cut off")
    lines, previous, run = [], None, None
    for number, row in enumerate(rows, 1):
        try:
            line = parse(row)
            run = line["run"] if run is None else run
            if previous is None:
                previous = digest(in_domain("log-start/1", run.encode()))
            if set(line) != LINE_KEYS or len(row) >= 4 * 2**20:
                raise ValueError("its form")
            if (line["run"], line["sequence"], line["previous"]) != (run, number - 1, previous):
                raise ValueError("its place")
            if datetime.fromisoformat(line["time"]).utcoffset() is None:
                raise ValueError("its time")
            unsigned = {name: value for name, value in line.items() if name != "signature"}
            check_signature(key, line["signature"], "log/1", canonical(unsigned))
        except (ValueError, TypeError, KeyError) as exc:
            raise RefusedError(f"line {number}: {exc}") from exc
        previous = digest(row)
        lines.append((line, previous))
    return lines


def session_keys(opening: dict, owner_key: bytes) -> dict:
    authority = x509.load_pem_x509_certificate(opening["authority"].encode())
    keys = {}
    for name, pem in opening["certificates"].items():
        subject, key, certificate = party_of(pem)
        certificate.verify_directly_issued_by(authority)
        if subject != name:
            raise RefusedError(f"the certificate of {name} is another party's")
        keys[name] = key
    if keys["owner"] != owner_key:
        raise RefusedError("the owner's certificate is not of who signed the log")
    return keys


def read_leaves(path: Path, body: dict) -> list:
    with path.open("rb") as file:
        file.seek(body["offset"])
        data = file.read(body["size_bytes"])
    leaves = data.split(b"\n")
    if len(data) != body["size_bytes"] or leaves.pop() or len(leaves) != body["leaves"]:
        raise RefusedError("leaves are missing")
    if merkle_root(leaves) != body["root"]:
        raise RefusedError("the leaves do not have the root")
    return [parse(leaf) for leaf in leaves]


def verify(run_dir: Path, owner_pem: str, heads: tuple = ()) -> Findings:
    """Check a log; `heads` are signed heads that it must contain, of which one at its end shows that it ends there."""
    name, owner_key, _ = party_of(owner_pem)
    if name != "owner":
        raise RefusedError("that is no owner's certificate")
    lines = read_lines(run_dir / "events.jsonl", owner_key)
    found, told = Findings(lines=len(lines)), False
    for head in heads:
        check_head(owner_key, head)
        n = head["num_events"]
        if n > len(lines):
            raise RefusedError(f"line {n} is missing")
        if n and lines[n - 1][1] != head["digest"]:
            raise RefusedError(f"line {n} is another one than was signed")
        told = told or n == len(lines)
    revealed = reveal(lines)
    follow(lines, run_dir, owner_key, revealed, found)
    if not (told or found.completed):
        found.doubts.append("lines may be missing at the end")
    return found


def reveal(lines: list) -> dict:
    """Keys by commitment, with the number of the line that tells them."""
    found = {}
    for number, (line, _) in enumerate(lines, 1):
        if line["kind"] == "audit_key_revealed":
            key = bytes.fromhex(line["body"]["key"])
            if hashlib.sha256(key).hexdigest() != line["body"]["commitment"]:
                raise RefusedError(f"line {number}: another key than was committed to")
            found.setdefault(line["body"]["commitment"], (key, number))
    return found


def follow(lines, run_dir, owner_key, revealed, found):
    session, due = None, None
    for number, (line, _) in enumerate(lines, 1):
        kind, body = line["kind"], line["body"]
        if kind in ("run_started", "run_resumed"):
            if kind == "run_resumed" and due is not None and body["step"] > due:
                raise RefusedError(f"step {due} is missing")
            session = Session(body, number, revealed, owner_key, session)
            due, found.completed = body["step"], False
            found.guarded = found.guarded or session.guarded
            found.doubts += session.doubts
        elif kind in ("rolled_back", "fell_back", "round_begun"):
            due = due_after(kind, body, due, session)
        elif kind == "stopped_early":
            session.opening = {**session.opening, "steps": body["step"]}
        elif kind == "run_completed":
            found.completed = True
            if session is not None and session.recorded and due != session.opening["steps"]:
                raise RefusedError(f"step {due} is missing")
        elif kind == "step":
            if body["step"] != due:
                raise RefusedError(f"step {due} is missing")
            if number > session.told_at:
                raise RefusedError(f"step {due}: drawn with a key that was known")
            due += 1
            found.recorded.add(body["step"])
            check_one(run_dir, line, session, found)


def due_after(kind, body, due, session):
    if kind != "round_begun":
        return min(due, body["to" if kind == "rolled_back" else "to_step"])
    each = session.opening.get("steps_a_round")
    if not each or body["step"] % each:
        raise RefusedError(f"a round begins at step {body['step']}")
    return body["step"]


class Session:
    """From one opening to the next; `names` are those that its steps were signed for."""

    def __init__(self, opening, number, revealed, owner_key, before):
        self.opening, self.names, self.doubts = opening, set(), []
        self.earlier = set() if before is None else before.earlier | before.names
        self.guarded = opening.get("audit_key_commitment") is not None
        self.recorded = self.guarded and opening.get("leaves_format") == 1
        self.keys, self.draw, self.told_at = {}, None, float("inf")
        if self.recorded:
            self.keys = session_keys(opening, owner_key)
            key, self.told_at = revealed.get(opening["audit_key_commitment"], (None, float("inf")))
            if key is None:
                self.doubts.append(f"line {number}: the key is not revealed")
            else:
                self.draw = Draw(key, bytes.fromhex(opening["audit_nonce"]), opening["guard"])
        elif self.guarded:
            self.doubts.append(f"line {number}: verdicts only")


def check_one(run_dir, line, session, found):
    body = line["body"]
    try:
        step = Step(read_leaves(run_dir / "steps.jsonl", body), session.opening, session.keys, session.draw)
        if (step.t, step.e) != (body["step"], body["epoch"]):
            raise RefusedError("leaves of another step")
        name = step.attempt["session"]
        session.names.add(name)
        if len(session.names) > 1 or name in session.earlier or not name.startswith(line["run"] + "-"):
            raise RefusedError("signed for another session")
        found.audits += step.check()
    except (RefusedError, ValueError, KeyError, TypeError, AttributeError, OSError) as exc:
        raise RefusedError(f"step {body['step']}: {exc}") from exc
    if session.draw is not None and step.guard["mode"] == "phalanx":
        found.proven.add(body["step"])


def main(arguments: list) -> int:
    run_dir = Path(arguments[0])
    certificate = Path(arguments[1]) if len(arguments) > 1 else run_dir / "owner.pem"
    summary = run_dir / "summary.json"
    heads = (json.loads(summary.read_text())["audit_log_head_signed"],) if summary.exists() else ()
    found = verify(run_dir, certificate.read_text(), heads)
    print(
        f"guarded: {found.guarded}; {len(found.proven)} of {len(found.recorded)} recorded steps proven; {found.doubts}"
    )
    return 0 if not found.doubts else 5


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
