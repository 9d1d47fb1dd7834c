"""The audit log: lines that are signed and chained, and steps whose audits are drawn again; see docs/audit_log.md."""

import hashlib
import hmac
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from .forms import (
    CertifiedParty,
    Member,
    RefusedError,
    UnreadableError,
    canonical,
    check_issuer,
    check_signature,
    check_signatures,
    digest,
    in_domain,
    merkle_root,
    parse,
    party_of,
    read_json,
    require,
)

OPENINGS = ("run_started", "run_resumed")
PUBLIC_KINDS = ("run_started", "run_resumed", "step", "evicted", "run_completed")
"""Kinds of lines that workers of other machines know of, and keep the last one of."""
_LINE_KEYS = {"sequence", "time", "run", "kind", "body", "previous", "signature"}
_MAX_LINE_BYTES = 4 * 2**20
_MAX_BATCH_BYTES = 64 * 2**20
_MAX_MICROBATCHES = 2**20
_NEVER = 2**63
_SHADOWS = ("gradient", "adapters", "lockstep")

Leaf = dict[str, Any]
Line = dict[str, Any]
Keys = Mapping[str, tuple[bytes, int]]


@dataclass
class LogFindings:
    """What a log shows.

    Attributes:
        last_digest: BLAKE3 of the last line, in hex, as the next one would name it.
        proven: Those of them with audits that were drawn again and found to be done.
        audits: Recomputed microbatches under the signatures of stage and auditor.
        is_adopted: Whether it began with a checkpoint of another run.
        remarks: Facts that hold and prove less than one may think.
        doubts: Missing facts, a sentence each.
        sessions: Opening of each session, with `line`, its number, and `revealed`, whether its key is told.
        certified: Digest of the manifest of each checkpoint that should be on disk, by step.
        manifests: Digests of all manifests that the log ever named, by step.
        weights: Digest of the final weights.
        session_names: Names that the messages of sessions were signed for, as far as steps show them.
        public: Digests of the lines that workers know of.
    """

    run: str = ""
    last_digest: str = ""
    recorded: set[int] = field(default_factory=set)
    proven: set[int] = field(default_factory=set)
    audits: int = 0
    is_adopted: bool = False
    is_completed: bool = False
    remarks: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    sessions: list[dict[str, Any]] = field(default_factory=list)
    certified: dict[int, str] = field(default_factory=dict)
    manifests: dict[int, set[str]] = field(default_factory=dict)
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    weights: str | None = None
    session_names: set[str] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)
    public: list[str] = field(default_factory=list)

    def describe_audits(self) -> str:
        """Say how much was audited: rates are the owner's choice, and at a low one nothing may have been drawn."""
        drawn = f"{len(self.proven)} of {len(self.recorded)} steps: each drawn audit was drawn again"
        return f"{drawn}; {self.audits} microbatches are signed by stage and auditor"


def check_head(owner: CertifiedParty, head: Mapping[str, Any]) -> None:
    """Return when the owner signed a head, which says how many lines there are and which one is the last."""
    statement = {name: head[name] for name in ("digest", "num_events", "run")}
    check_signatures(owner, head, "log-head/1", canonical(statement))


def verify(run_dir: Path, owner_pem: str, heads: Iterable[Mapping[str, Any]] = ()) -> LogFindings:
    """Check the log of a run directory.

    Args:
        owner_pem: Certificate of the owner, which you should have kept.
        heads: Signed heads that the log must contain; one at its end shows that it ends there.
    """
    owner = read_owner(owner_pem)
    leaves = Member.from_file(path) if (path := run_dir / "steps.jsonl").exists() else None
    return verify_log(Member.from_file(run_dir / "events.jsonl"), leaves, owner, heads)


def read_owner(owner_pem: str) -> CertifiedParty:
    """Read the owner's certificate."""
    owner = party_of(owner_pem)
    require(owner.name == "owner", "that is no owner's certificate")
    return owner


def verify_log(
    events: Member, leaves: Member | None, owner: CertifiedParty, heads: Iterable[Mapping[str, Any]] = ()
) -> LogFindings:
    """Check every line, draw the audits of every step again, and check that all were done.

    Raises:
        RefusedError: Names the first line or step that does not hold.
    """
    lines = read_lines(events, owner.key)
    findings = LogFindings(
        lines=[line_digest for _, line_digest in lines],
        public=[line_digest for entry, line_digest in lines if entry["kind"] in PUBLIC_KINDS],
    )
    findings.run, findings.last_digest = (lines[0][0]["run"], lines[-1][1]) if lines else ("", "")
    is_end_told = False
    for head in heads:
        is_end_told = _check_known_head(head, findings, owner) or is_end_told
    _LogReader(leaves, owner, _revealed_keys(lines), findings).read_lines(lines)
    if not findings.sessions:
        findings.doubts.append("no session of a run has begun in the log")
    if not (is_end_told or findings.is_completed):
        findings.doubts.append("lines may be missing at the end")
    return findings


def _check_known_head(head: Mapping[str, Any], findings: LogFindings, owner: CertifiedParty) -> bool:
    """Compare the log with a head; return whether it is the log's end."""
    try:
        check_head(owner, head)
        number = head["num_events"]
        require(head["run"] == findings.run, f"a head is of run {head['run']!r:.80}")
    except (ValueError, KeyError, TypeError) as exc:
        raise RefusedError(f"a head of the log does not hold: {exc}") from exc
    require(number <= len(findings.lines), f"line {number} is missing")
    require(not number or findings.lines[number - 1] == head["digest"], f"line {number} is another one than was signed")
    return bool(number == len(findings.lines))


def check_kept_head(data: bytes, findings: LogFindings, owner: CertifiedParty) -> str | None:
    """Compare a log with a head that somebody else kept; return what may honestly be missing at its end.

    Args:
        data: A head as a worker saves it (``log_heads/RUN-KEY.json``), or a signed head of the whole log.

    Raises:
        RefusedError: The log lacks a line that its owner has shown to others: it was cut, or written anew.
    """
    try:
        head = parse(data)
        if "num_events" in head:
            _check_known_head(head, findings, owner)
            return None
        signed = canonical({name: head[name] for name in ("boot", "forced", "last", "run")})
        check_signature(owner.key, head["signature"], "log-public-head/1", signed)
        require(head["run"] == findings.run, f"is of run {head['run']!r:.80}")
        forced, last = head["forced"], head["last"]
        if forced is not None:
            is_there = findings.public[forced["number"] - 1 : forced["number"]] == [forced["digest"]]
            require(is_there, f"the log lacks public line {forced['number']}, which its owner has shown to others")
        shown = findings.public[last["number"] - 1 : last["number"]]
    except (ValueError, KeyError, TypeError) as exc:
        raise RefusedError(f"no head of this log: {exc}") from exc
    is_same = shown in ([], [last["digest"]])
    require(is_same, f"public line {last['number']} is another one than its owner showed to others")
    return None if shown else f"public line {last['number']}, which others know: only a crash can have taken it"


def read_lines(events: Member, key: bytes) -> list[tuple[Line, str]]:
    """Return every line with its digest, checked; the first broken one is refused with its number."""
    rows = events.read_all(2**34).split(b"\n")
    require(not rows.pop(), f"line {len(rows) + 1} is cut off")
    lines: list[tuple[Line, str]] = []
    previous, run = "", None
    for number, row in enumerate(rows, 1):
        try:
            entry = parse(row)
            run = entry["run"] if run is None else run
            if number == 1:
                previous = digest(in_domain("log-start/1", run.encode()))
            _check_line(entry, row, run, number, previous)
            check_signature(key, entry["signature"], "log/1", canonical(_without_signature(entry)))
        except (RefusedError, ValueError, TypeError, KeyError, AttributeError) as exc:
            raise RefusedError(f"line {number}: {exc}") from exc
        previous = digest(row)
        lines.append((entry, previous))
    return lines


def _without_signature(line: Line) -> Line:
    return {name: value for name, value in line.items() if name != "signature"}


def _check_line(line: Line, row: bytes, run: str, number: int, previous: str) -> None:
    is_formed = set(line) == _LINE_KEYS and len(row) < _MAX_LINE_BYTES and isinstance(line["body"], dict)
    require(is_formed, "its form")
    require((line["run"], line["sequence"], line["previous"]) == (run, number - 1, previous), "its place")
    require(datetime.fromisoformat(line["time"]).utcoffset() is not None, "its time")


def _revealed_keys(lines: Sequence[tuple[Line, str]]) -> dict[str, tuple[bytes, int]]:
    """Return audit keys by commitment, with the number of the line that tells them."""
    keys: dict[str, tuple[bytes, int]] = {}
    for number, (entry, _) in enumerate(lines, 1):
        if entry["kind"] == "audit_key_revealed":
            try:
                key, commitment = bytes.fromhex(entry["body"]["key"]), entry["body"]["commitment"]
            except (ValueError, KeyError, TypeError) as exc:
                raise RefusedError(f"line {number}: a malformed key") from exc
            require(hashlib.sha256(key).hexdigest() == commitment, f"line {number}: another key than was committed to")
            keys.setdefault(commitment, (key, number))
    return keys


class _Session:
    """The lines from one opening to the next; its steps were signed for `names`."""

    def __init__(self, opening: Line, number: int, keys: Keys, owner: CertifiedParty, earlier: set[str]) -> None:
        self.opening, self.earlier, self.names = opening, earlier, set[str]()
        self.doubts: list[str] = []
        commitment = opening.get("audit_key_commitment")
        self.has_records = commitment is not None and opening.get("leaves_format") == 1
        self.keys: dict[str, bytes] = {}
        self.draw: LoggedDraw | None = None
        self.told_at = _NEVER
        if commitment is None or (self.has_records and opening["guard"]["mode"] != "phalanx"):
            # a session without a guard behind one with it would train what nobody has audited
            self.doubts.append(f"line {number}: the guard was off: no step was verified")
        if self.has_records:
            words = opening["guard"]["mode"], opening["guard"]["shadow"]
            require(words[0] in ("phalanx", "off") and words[1] in _SHADOWS, f"the guard of another version: {words}")
            self.keys = _session_keys(opening, owner)
            key, self.told_at = keys.get(str(commitment), (b"", _NEVER))
            if key:
                self.draw = LoggedDraw(key, bytes.fromhex(opening["audit_nonce"]), opening["guard"])
            else:
                self.doubts.append(f"line {number}: the key of the audits is not revealed")
        elif commitment is not None:
            self.doubts.append(f"line {number}: verdicts only")


def _session_keys(opening: Line, owner: CertifiedParty) -> dict[str, bytes]:
    keys = {}
    for name, pem in opening["certificates"].items():
        party = party_of(pem)
        check_issuer(party, opening["authority"])
        require(party.name == name, f"the certificate of {name} is another party's")
        keys[name] = party.key
    require(keys.get("owner") == owner.key, "the owner's certificate is not of who signed the log")
    return keys


class _LogReader:
    """Follow sessions and steps through the lines of a log."""

    def __init__(self, leaves: Member | None, owner: CertifiedParty, keys: Keys, findings: LogFindings) -> None:
        self._leaves, self._owner, self._keys, self._findings = leaves, owner, keys, findings
        self._session: _Session | None = None
        # None within and behind a session without records
        self._due: int | None = 0
        self._end_of_leaves = 0

    def read_lines(self, lines: Sequence[tuple[Line, str]]) -> None:
        """Read all lines, in order."""
        for number, (entry, _) in enumerate(lines, 1):
            try:
                self._read_line(entry, number)
            except RefusedError as exc:
                raise RefusedError(f"line {number}: {exc}") from exc
            except (ValueError, KeyError, TypeError, AttributeError) as exc:
                raise RefusedError(f"line {number}: {entry['kind']!r} is malformed ({exc})") from exc

    def _read_line(self, line: Line, number: int) -> None:
        kind, body, findings = line["kind"], line["body"], self._findings
        if kind in OPENINGS:
            self._open_session(body, number)
        elif kind in ("rolled_back", "fell_back", "round_begun"):
            self._go_back(kind, body)
        elif kind == "stopped_early" and self._session is not None:
            self._session.opening = {**self._session.opening, "steps": body["step"]}
        elif kind == "run_completed":
            findings.is_completed, findings.weights = True, body.get("final_weights_digest")
            if self._session is not None and self._session.has_records and self._due != self._session.opening["steps"]:
                raise RefusedError(f"step {self._due} is missing")
        elif kind == "step":
            self._read_step(line, number)
        elif kind == "verdict":
            findings.verdicts.append(body)
        elif kind == "adopted":
            require(not findings.sessions, "another run's state in the middle of this one")
            findings.is_adopted, self._due = True, body["step"]
            findings.remarks.append(f"it began with the state of run {body['run']!r:.80} at step {self._due}")
        _follow_checkpoints(kind, body, findings)

    def _open_session(self, body: Line, number: int) -> None:
        findings, last, step = self._findings, self._session, body.get("step", 0)
        require(self._due is None or step <= self._due, f"step {self._due} is missing")
        session = _Session(body, number, self._keys, self._owner, set() if last is None else last.earlier | last.names)
        self._session, self._due = session, step if session.has_records else None
        findings.is_completed, findings.weights = False, None
        findings.doubts += session.doubts
        if "steps_a_round" in body:
            findings.remarks.append(f"line {number}: the log of a site: it proves its rounds, and not that it had no other")
        findings.sessions.append({**body, "line": number, "revealed": session.told_at < _NEVER})

    def _go_back(self, kind: str, body: Line) -> None:
        if kind != "round_begun":
            to = body["to" if kind == "rolled_back" else "to_step"]
            self._due = None if self._due is None else min(self._due, to)
            return
        steps_a_round = None if self._session is None else self._session.opening.get("steps_a_round")
        is_round = bool(steps_a_round) and divmod(body["step"], steps_a_round)[1] == 0
        require(is_round, f"a round begins at step {body['step']}")
        self._due = body["step"]

    def _read_step(self, line: Line, number: int) -> None:
        body, session, findings = line["body"], self._session, self._findings
        step = body["step"]
        if session is None:
            raise RefusedError("a step before the run began")
        require(step == self._due, f"step {self._due} is missing")
        require(number <= session.told_at, f"step {step}: drawn with a key that was known")
        self._due = step + 1
        findings.recorded.add(step)
        try:
            if self._leaves is None:
                raise RefusedError("its leaves are not here")  # noqa: TRY301
            # each step has leaves of its own: one batch, named by line after line, would be read without end
            require(body["offset"] >= self._end_of_leaves, "its leaves are those of an earlier step")
            self._end_of_leaves = body["offset"] + body["size_bytes"]
            record = _StepRecord(_read_leaves(self._leaves, body), session.opening, session.keys, session.draw)
            require((record.step, record.epoch) == (step, body["epoch"]), "leaves of another step")
            name = record.attempt["session"]
            session.names.add(name)
            findings.session_names.add(name)
            is_own = len(session.names) == 1 and name not in session.earlier and name.startswith(f"{line['run']}-")
            require(is_own, "signed for another session")
            findings.audits += record.check_work()
        except (RefusedError, ValueError, KeyError, TypeError, AttributeError) as exc:
            raise RefusedError(f"step {step}: {exc}") from exc
        if session.draw is not None and record.guard["mode"] == "phalanx":
            findings.proven.add(step)
        else:
            findings.proven.discard(step)


def _follow_checkpoints(kind: str, body: Line, findings: LogFindings) -> None:
    """Keep the checkpoints that should be on disk by the log."""
    certified = findings.certified
    if kind == "checkpoint_saved":
        findings.manifests.setdefault(body["step"], set()).add(body["manifest"])
        present = {**certified, body["step"]: body["manifest"]}
        findings.certified = {step: present[step] for step in body["kept"] if step in present}
    elif kind in ("rolled_back", "older_accepted"):
        last = body["to" if kind == "rolled_back" else "step"]
        findings.certified = {step: manifest for step, manifest in certified.items() if step <= last}


def _read_leaves(leaves: Member, body: Line) -> list[Leaf]:
    size = body["size_bytes"]
    require(0 < size <= _MAX_BATCH_BYTES, "its leaves have no possible size")
    rows = leaves.read_range(body["offset"], size).split(b"\n")
    require(not rows.pop() and len(rows) == body["leaves"], "leaves are missing")
    require(merkle_root(rows) == body["root"], "the leaves do not have the root")
    return [parse(row) for row in rows]


class LoggedDraw:
    """The draw of audits from a revealed key."""

    def __init__(self, key: bytes, nonce: bytes, guard: Mapping[str, Any]) -> None:
        self._session_key = hmac.new(key, b"phalanx draws/1 " + nonce, hashlib.sha256).digest()
        self._guard = guard

    def number(self, *place: int) -> int:
        """Return the first 8 bytes that the key gives for a place."""
        return int.from_bytes(hmac.new(self._session_key, canonical(list(place)), hashlib.sha256).digest()[:8], "big")

    def coin(self, *place: int) -> float:
        """Return a number from 0 to 1."""
        return self.number(*place) / 2**64

    def microbatches(self, step: int, epoch: int, stage: int, count: int) -> list[int]:
        """Return the drawn ones of `count` microbatches, one from each stratum."""
        rate = self._guard["audit_rate"]
        require(type(rate) in (int, float) and 0 <= rate <= 1, "its rate of audits")
        if self._guard.get("min_audits", 1) == 0 and self.coin(step, epoch, stage, -7) >= rate * count:
            return []
        strata = math.ceil(rate * count)
        edges = [round(n * count / strata) for n in range(strata + 1)]
        return [edges[n] + self.number(step, epoch, stage, n) % (edges[n + 1] - edges[n]) for n in range(strata)]


class _StepRecord:
    """The leaves of one step."""

    def __init__(self, leaves: list[Leaf], opening: Line, keys: Mapping[str, bytes], draw: LoggedDraw | None) -> None:
        self._opening, self._keys, self._draw, self.guard = opening, keys, draw, opening["guard"]
        self._by_kind: dict[str, list[Leaf]] = {}
        for leaf in leaves:
            self._by_kind.setdefault(leaf["leaf"], []).append(leaf)
        (self.attempt,) = self._by_kind["attempt"]
        self.step, self.epoch = self.attempt["step"], self.attempt["epoch"]
        self._holders = {int(stage): pair[0] for stage, pair in self.attempt["stages"].items()}
        self._shadows = {int(stage): pair[1] for stage, pair in self.attempt["stages"].items() if pair[1] is not None}
        self._classes = self.guard["classes"]
        require(not (self.attempt["classes"] and self._classes == "one"), "somebody is of another class than the run's")
        self._audits = {(leaf["stage"], leaf["microbatch"], leaf["auditor"]): leaf for leaf in self._leaves("audit")}
        self._whole_audits = {(leaf["stage"], leaf["auditor"]) for leaf in self._leaves("step_audit")}
        self._owner_audits = {leaf["stage"] for leaf in self._leaves("owner_audit")}

    def check_work(self) -> int:
        """Return the number of audits under two signatures, when everything that was drawn was done."""
        self._check_cover()
        asked: set[tuple[int, int, str]] = set()
        for leaf in self._leaves("draw"):
            asked |= {(leaf["stage"], m, leaf["auditor"]) for m in leaf["microbatches"]}
            self._demand(leaf["stage"], leaf["auditor"], leaf["microbatches"], is_whole=leaf["whole"])
        if self._draw is not None and self.guard["mode"] == "phalanx":
            self._draw_again(self._draw, asked)
        for leaf in self._leaves("step_audit"):
            self._check_whole_audit(leaf)
        return sum(self._check_audit(leaf) for leaf in self._audits.values())

    def _leaves(self, kind: str) -> list[Leaf]:
        return self._by_kind.get(kind, [])

    def _bits_decide(self, one: str, other: str) -> bool:
        classes = self.attempt["classes"]
        return bool(self._classes != "mixed" and classes.get(one, 0) == classes.get(other, 0))

    def _check_cover(self) -> None:
        commits = {leaf["stage"]: leaf["party"] for leaf in self._leaves("commit")}
        states = {leaf["stage"] for leaf in self._leaves("state")}
        require(set(self._holders) == set(range(len(self._opening["stages"]))), "a stage is missing")
        for stage, holder in self._holders.items():
            is_watched = holder == "owner" or (stage in self._shadows and stage in states)
            require(is_watched, f"stage {stage} is not watched")
            require(commits.get(stage) == holder, f"stage {stage} has no commitment")

    def _demand(self, stage: int, auditor: str, microbatches: Iterable[int], *, is_whole: bool) -> None:
        for m in microbatches:
            require((stage, m, auditor) in self._audits, f"stage {stage}, microbatch {m}: drawn and not audited")
        if is_whole:
            require((stage, auditor) in self._whole_audits, f"stage {stage}: weight gradient drawn and not audited")

    def _draw_again(self, draw: LoggedDraw, asked: set[tuple[int, int, str]]) -> None:
        for stage in sorted(self._shadows):
            is_owners = draw.coin(self.step, self.epoch, stage, -2) < self.guard["owner_audit_rate"]
            is_done = not is_owners or stage in self._owner_audits
            require(is_done, f"stage {stage}: the owner's audit was drawn and not made")
            if self._holders[stage] != "owner":
                microbatches, is_whole = self._drawn_work(draw, stage)
                auditor = self._shadows[stage]
                is_same = {(stage, m, auditor) for m in microbatches} <= asked
                require(is_same, f"stage {stage}: another draw than the key's")
                self._demand(stage, auditor, microbatches, is_whole=is_whole)

    def _drawn_work(self, draw: LoggedDraw, stage: int) -> tuple[list[int], bool]:
        count, is_lockstep = self._opening["microbatches"], self.guard["shadow"] == "lockstep"
        require(type(count) is int and 0 < count <= _MAX_MICROBATCHES, "its number of microbatches")
        is_whole = not is_lockstep and draw.coin(self.step, self.epoch, stage, -1) < self.guard["step_audit_rate"]
        if is_whole or is_lockstep:
            return list(range(count)), is_whole
        return draw.microbatches(self.step, self.epoch, stage, count), False

    def _check_audit(self, leaf: Leaf) -> bool:
        stage, m, auditor = leaf["stage"], leaf["microbatch"], leaf["auditor"]
        holder, place = self._holders[stage], f"stage {stage}, microbatch {m}"
        if leaf["report"] is None:
            require(auditor == "owner", f"{place}: the report is not signed")
            reported = leaf["digests"]
        else:
            report = self._open_header(leaf["report"], auditor, "audit_report", stage=stage, microbatch=m)
            reported = report["body"]["digests"]
        require(set(reported) == {"forward", "backward"}, f"{place}: half an audit")
        for direction, output in zip(("forward", "backward"), leaf["outputs"], strict=True):
            if output is None:
                require(holder == "owner", f"{place}: what was sent is not shown")
                continue
            sent = self._open_header(output, holder, "tensor", source=stage, microbatch=m, direction=direction)
            is_equal = sent["payload_digest"] == reported[direction]
            require(is_equal or not self._bits_decide(auditor, holder), f"{place}: the digests differ")
        return leaf["report"] is not None

    def _check_whole_audit(self, leaf: Leaf) -> None:
        stage, auditor = leaf["stage"], leaf["auditor"]
        holder = self._holders[stage]
        is_signed = leaf["commit"] is not None and (leaf["report"] is not None or auditor == "owner")
        require(is_signed, f"stage {stage}: a weight gradient is not signed")
        committed = self._open_header(leaf["commit"], holder, "commit", stage=stage)["body"]
        audited = leaf
        if leaf["report"] is not None:
            audited = self._open_header(leaf["report"], auditor, "step_audited", stage=stage)["body"]
        is_equal = all(audited[name] == committed[name] for name in ("gradient", "norm_squared"))
        require(is_equal or not self._bits_decide(auditor, holder), f"stage {stage}: the weight gradients differ")

    def _open_header(self, signed: Mapping[str, str], party: str, kind: str, **place: object) -> Line:
        header = open_header(signed, self._keys, party)
        expected = {"step": self.step, "epoch": self.epoch, **place}
        stated = {name: header["body"].get(name) for name in expected}
        is_about = (header["kind"], header["run"], stated) == (kind, self.attempt["session"], expected)
        require(is_about, f"{party} signed this {kind} for something else")
        return header


def open_header(signed: Mapping[str, str], keys: Mapping[str, bytes], party: str | None = None) -> Line:
    """Check the signature of a message header and return the header.

    Args:
        keys: Keys by the name in the certificate; a party in a later life is called NAME.N.
        party: Who must have sent it; None accepts any with a key.

    Raises:
        RefusedError: Another party sent it, or one without a certificate.
        ValueError: It is malformed, or its signature does not hold.
    """
    text = signed["header"].encode()
    header = parse(text)
    sender = header["sender"]
    require(party in (None, sender), f"a header is from {sender!r:.80}, expected {party}")
    key = keys.get(str(sender).partition(".")[0])
    if key is None:
        raise RefusedError(f"{sender!r:.80} has no certificate")
    check_signature(key, signed["signature"], "frame/1", text)
    return header


def read_summary_head(run_dir: Path) -> tuple[Mapping[str, Any], ...]:
    """Return the signed head in ``summary.json``, where there is one."""
    try:
        head = read_json(Member.from_file(run_dir / "summary.json").read_all(2**28))["audit_log_head_signed"]
    except (RefusedError, UnreadableError, ValueError, KeyError, TypeError):
        return ()
    return (head,) if isinstance(head, dict) else ()
