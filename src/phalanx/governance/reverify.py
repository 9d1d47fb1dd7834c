"""Strangers recompute a run: segments between published states, drawn from a seed of their own, bit for bit.

Equal bits prove a segment on any machine. Other bits refute it on a machine of the class that the log names, and
anywhere with exact arithmetic; elsewhere they decide nothing. The order of the data is drawn again for every step.
"""

import hmac
import itertools
import json
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from fractions import Fraction
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from phalanx.checkpoint import step_directory
from phalanx.config import canonical_json
from phalanx.errors import (
    AuditLogError,
    CheckpointError,
    ConfigError,
    DataError,
    InputError,
    ModelError,
    VerificationError,
)
from phalanx.governance.publication import (
    DATA,
    MODEL,
    STATES,
    RunPublication,
    read_summary,
    staged_run,
    why_not_recomputed,
)
from phalanx.governance.recomputation import (
    Laboratory,
    LocalPlaces,
    LoggedSteps,
    RunSegment,
    SegmentResult,
    StepDifference,
    Verdict,
    open_laboratory,
    recompute_segment,
)
from phalanx.governance.statements import sign_by_ed25519
from phalanx.security.audit import LogHead
from phalanx.security.audit.line import read_entries
from phalanx.security.crypto import Identity
from phalanx.train import PastRun
from phalanx.train.records.audit_trail import LOG_FILE
from phalanx.train.records.proof import verify_run
from phalanx.train.setup.process import deterministic_kernels
from phalanx.verifier.statement import ATTESTATION_PREDICATE, by_ed25519_key, open_statement

ATTESTATION_FILE = "reverification.dsse.json"
_PROGRESS_FILE = "progress.json"

Tell = Callable[[int, int], None]
"""Told how many of so many steps are recomputed."""


@dataclass(frozen=True)
class Reverification:
    """What a stranger found.

    Attributes:
        ordered: Steps whose place in the order of the data was drawn again.
        remarks: Facts that hold and prove less than one may think.
        cost: CPU seconds, seconds and bytes that were read.
    """

    verdict: Verdict
    seed: str
    share: str
    num_steps: int
    ordered: int
    results: tuple[SegmentResult, ...]
    remarks: tuple[str, ...]
    cost: Mapping[str, float]

    @property
    def first_difference(self) -> StepDifference | None:
        """The first fact that differs, by step."""
        differences = [result.first_difference for result in self.results if result.first_difference is not None]
        return min(differences, key=lambda difference: difference.step, default=None)

    @property
    def recomputed(self) -> int:
        """Steps that have the published bits."""
        return sum(result.segment.num_steps for result in self.results if result.verdict == "proved")

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why segments could not be decided."""
        if not self.results:
            return ("no state is published that a step could be recomputed from",)
        return tuple(dict.fromkeys(result.why for result in self.results if result.why))

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        difference = self.first_difference
        first = None if difference is None else asdict(difference)
        return {**asdict(self), "recomputed": self.recomputed, "first_difference": first, "reasons": self.reasons}


@dataclass(frozen=True)
class ReverificationPrice:
    """What a reverification costs, known before it begins.

    Attributes:
        steps: Steps to recompute, of `num_steps`.
        seconds: Time that the run took for as many steps; None where its summary does not say.
    """

    segments: tuple[RunSegment, ...]
    steps: int
    num_steps: int
    tokens: int
    size_bytes: int
    seconds: float | None

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class RequestedPlaces:
    """Directories that a stranger brings.

    Attributes:
        cache: Directory of prepared models and tokens; made when missing.
        data: Copy of the data set; None takes the published one.
        model: Copy of the files that the model began with; None takes the published ones.
    """

    cache: Path
    data: Path | None = None
    model: Path | None = None


class Reverifier:
    """Recomputes segments of a publication.

    Attributes:
        obstacle: Why nobody but the owner can recompute the run; None where strangers can.
        remarks: Facts that hold and prove less than one may think.
        num_steps: Steps that the run has done.

    Raises:
        VerificationError: A state is of another run, or none that the log certifies; or the log does not hold.
    """

    def __init__(self, publication: RunPublication, places: RequestedPlaces) -> None:
        self.publication, self._cache = publication, places.cache
        path, manifest = publication.path, publication.manifest
        try:
            self._past = past = PastRun(path)
        except CheckpointError as exc:
            raise VerificationError(str(exc)) from exc
        self.obstacle = why_not_recomputed(past)
        if past.owner != publication.owner or past.run_id != manifest.run:
            raise VerificationError(f"{path}: log and manifest are of two owners or runs")
        self._facts = facts = LoggedSteps()
        last_head = _read_log(past, facts)
        if last_head != LogHead(manifest.log_events, manifest.log_digest):
            raise VerificationError(f"{path}: its log ends elsewhere than the manifest says")
        proof = verify_run(path)
        self.remarks = [*proof.remarks, *proof.unproven, *proof.in_doubt]
        if not publication.is_expected:
            self.remarks.append("the owner's key is the one that was published: compare it, or give --certificate")
        if facts.first_step:
            self.remarks.append(
                f"steps before {facts.first_step} had another run file and cannot be recomputed; where in the data the "
                "first published state after them stood is the owner's word"
            )
        if facts.given_up:
            self.remarks.append(
                f"{sum(facts.given_up.values())} batches were given up at {len(facts.given_up)} steps: that they had "
                "failed is the owner's word"
            )
        self._check_states()
        self._data, self._is_brought = places.data or _directory_in(path, DATA), places.data is not None
        self._model = places.model or _directory_in(path, MODEL)
        self.num_steps = max([step + 1 for step in facts.steps] + list(manifest.states), default=0)

    def _check_states(self) -> None:
        """Return when every published state is one that the log certifies."""
        past, states = self._past, self.publication.manifest.states
        present = {name.split("/")[1] for name in self.publication.manifest.files if name.startswith(f"{STATES}/")}
        if present != {step_directory(step) for step in states}:
            raise VerificationError(f"{past.checkpoints}: has other states than the manifest lists")
        for step in states:
            if step not in past.certified_steps:
                raise VerificationError(f"{past.checkpoints}: the log certifies no state of step {step}")
            try:
                past.open_verified(step)
            except CheckpointError as exc:
                raise VerificationError(str(exc)) from exc

    @property
    def segments(self) -> list[RunSegment]:
        """All segments that have a state to begin at."""
        states = set(self.publication.manifest.states)
        starts = {0, *states} if self._draws_first_state else states
        bounds = sorted({*starts, self.num_steps})
        pairs = itertools.pairwise(bounds)
        return [RunSegment(*pair) for pair in pairs if pair[0] in starts and pair[0] >= self._facts.first_step]

    @property
    def _draws_first_state(self) -> bool:
        """Whether the state before step 0 can be made here."""
        model = self._past.config.model
        has_files = model.path is None or self._model is not None
        return has_files and model.adapter_directory is None and not self._facts.adopted

    def draw_segments(self, share: Fraction, seed: str) -> list[RunSegment]:
        """Draw whole segments at random until they have a share of all steps; none where no state is published.

        Guarantees:
            Segments of equal length are drawn with equal probability. Whoever published cannot foresee the draw, since
            the seed is the reader's, and cannot steer it by altering a file, for the manifest's digest is part of it.
        """
        goal, drawn, covered = math.ceil(share * self.num_steps), list[RunSegment](), 0
        for segment in sorted(self.segments, key=lambda part: self._draw_number(seed, part)):
            if covered < goal:
                drawn.append(segment)
                covered += segment.num_steps
        return sorted(drawn)

    def _draw_number(self, seed: str, segment: RunSegment) -> bytes:
        place = canonical_json([self.publication.digest, segment.start, segment.end])
        return hmac.digest(seed.encode(), place, "sha256")

    def find_segment(self, step: int) -> RunSegment:
        """Return the shortest segment that ends with a step.

        Raises:
            InputError: The run has no such step, or no state before it is published.
        """
        segment = next((part for part in self.segments if part.start <= step < part.end), None)
        if segment is None:
            raise InputError(f"{self.publication.path}: no state before step {step} of {self.num_steps} is published")
        return replace(segment, end=step + 1)

    def estimate_price(self, segments: Sequence[RunSegment]) -> ReverificationPrice:
        """Return the cost of recomputing segments."""
        run, steps = self._past.config, sum(segment.num_steps for segment in segments)
        summary = read_summary(self.publication.path)
        wall, trained = summary.get("wall_s"), summary.get("steps")
        seconds = None
        if isinstance(wall, int | float) and isinstance(trained, int) and trained > 0:
            seconds = round(float(wall) / trained * steps, 1)
        return ReverificationPrice(
            segments=tuple(segments),
            steps=steps,
            num_steps=self.num_steps,
            tokens=steps * run.train.batch_size * run.data.sequence_length,
            size_bytes=self.publication.size_bytes,
            seconds=seconds,
        )

    def recompute_segments(
        self, segments: Sequence[RunSegment], draw: tuple[str, str], work: Path, tell: Tell = lambda done, of: None
    ) -> Reverification:
        """Recompute segments, and go on where an earlier call for the same publication and seed was interrupted.

        Args:
            draw: Seed and share that they were drawn with, for the record.
            work: Directory of the progress; made when missing.
        """
        begun = time.perf_counter(), time.process_time()
        progress = _Progress(work, self.publication.digest, draw[0])
        with deterministic_kernels(self._past.config.train.threads):
            lab, why = self._open_laboratory()
            order = None if lab is None else lab.check_order()
            results, done, total = dict[RunSegment, SegmentResult](), 0, sum(part.num_steps for part in segments)
            for segment in segments:
                result = progress.results.get(segment)
                if lab is None:
                    result = SegmentResult(segment, "undecided", why=why)
                elif order is None and result is None:
                    result = recompute_segment(lab, segment, partial(_tell_sum, tell, total, done))
                    progress.note_result(result)
                if result is not None:
                    results[segment] = result
                done += segment.num_steps
        if order is not None:
            # true on any machine, and nothing behind it needs to be recomputed
            place = RunSegment(order.step, order.step + 1)
            results = {place: SegmentResult(place, "refuted", order)}
        cost = {
            "seconds": round(time.perf_counter() - begun[0], 2),
            "cpu_seconds": round(time.process_time() - begun[1], 2),
            "bytes": float(self.publication.size_bytes),
        }
        return Reverification(
            verdict=_weigh_results(results.values()),
            seed=draw[0],
            share=draw[1],
            num_steps=self.num_steps,
            ordered=0 if lab is None else _count_ordered(lab),
            results=tuple(results.values()),
            remarks=tuple(self.remarks),
            cost=cost,
        )

    def _open_laboratory(self) -> tuple[Laboratory | None, str]:
        """Return what segments are recomputed with, or why there is nothing to do it with."""
        if self.obstacle is not None:
            return None, f"nobody but the owner can recompute this run: {self.obstacle}"
        run, manifest = staged_run(self._past), self.publication.manifest
        if self._data is None:
            return None, "the data is not published: give --data DIR"
        if run.model.path is not None and self._model is None:
            return None, "the files that the model began with are not published: give --model DIR"
        shown = sum(file.size_bytes for name, file in manifest.files.items() if name.endswith(".safetensors"))
        model = self._model if run.model.path is not None else None
        places = LocalPlaces(self._data, model, self._cache, self._is_brought, manifest.base, shown)
        try:
            return open_laboratory(self._past, run, self._facts, manifest.states, places), ""
        except (ConfigError, ModelError, DataError) as exc:
            return None, f"what the run needs is not here, or is another: {exc}"


def choose_seed(work: Path, digest: str, seed: str | None) -> str:
    """Return the given seed, or that of an interrupted call for the same publication, or a fresh one."""
    if seed is not None:
        return seed
    data = _read_progress(work)
    return str(data["seed"]) if data.get("publication") == digest else secrets.token_hex(32)


class _Progress:
    """The results so far, in a file of the stranger: a later call goes on from it."""

    def __init__(self, work: Path, digest: str, seed: str) -> None:
        self.results: dict[RunSegment, SegmentResult] = {}
        self._path, self._head = work / _PROGRESS_FILE, {"publication": digest, "seed": seed}
        try:
            work.mkdir(parents=True, exist_ok=True)
            data = _read_progress(work)
            if {name: data.get(name) for name in self._head} == self._head:
                rows = [SegmentResult.from_json(row) for row in data["results"]]
                self.results = {row.segment: row for row in rows}
            self._write_file()
        except OSError as exc:
            raise InputError(f"{work}: cannot be written ({exc.strerror}); choose another --out") from exc

    def note_result(self, result: SegmentResult) -> None:
        """Keep a result."""
        self.results[result.segment] = result
        self._write_file()

    def _write_file(self) -> None:
        # what could not be decided is tried again: it may be, on another machine
        rows = [asdict(row) for row in self.results.values() if row.verdict != "undecided"]
        temporary = self._path.with_suffix(".tmp")
        temporary.write_bytes(canonical_json({**self._head, "results": rows}))
        temporary.replace(self._path)


def _read_progress(work: Path) -> dict[str, Any]:
    try:
        data = json.loads((work / _PROGRESS_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def sign_attestation(reverification: Reverification, publication: RunPublication, signer: Identity) -> bytes:
    """Return an in-toto statement about a publication, signed with the stranger's key (DSSE, Ed25519)."""
    manifest = publication.manifest
    subjects = [
        {"name": f"publication of run {manifest.run}", "digest": {"sha256": publication.digest}},
        {"name": f"log of run {manifest.run}", "digest": {"blake3": manifest.log_digest}},
    ]
    predicate = {
        **reverification.to_json(),
        "run": manifest.run,
        "owner": publication.owner.public_key.hex(),
        "passport": manifest.passport,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "software": metadata.version("phalanx-train"),
    }
    return sign_by_ed25519(signer, subjects, ATTESTATION_PREDICATE, predicate)


def check_attestation(data: bytes, signer: str, publication: RunPublication) -> dict[str, Any]:
    """Check the attestation of a stranger about a publication, and return its predicate.

    Args:
        signer: Fingerprint of the stranger's key that you expect.

    Raises:
        RefusedError: Another key signed it, or it was altered.
        VerificationError: It is about another publication.
    """
    statement = open_statement(data, [by_ed25519_key(bytes.fromhex(signer))], ATTESTATION_PREDICATE)
    if publication.digest not in [subject["digest"].get("sha256") for subject in statement["subject"]]:
        raise VerificationError("the attestation is about another publication")
    return dict(statement["predicate"])


def _read_log(past: PastRun, facts: LoggedSteps) -> LogHead | None:
    """Follow every line of the log; return its end."""
    path, head = past.path / LOG_FILE, None
    try:
        with path.open("rb") as file:
            for entry in read_entries(file, path, past.owner, past.run_id):
                facts.read_entry(entry)
                head = entry.head
    except (KeyError, TypeError, ValueError) as exc:
        raise AuditLogError(f"{path}: a line lacks what it must have ({exc})") from exc
    return head


def _count_ordered(lab: Laboratory) -> int:
    begin = lab.first_ordered
    return 0 if begin is None else sum(step >= begin for step in lab.facts.steps)


def _tell_sum(tell: Tell, total: int, before: int, taken: int) -> None:
    tell(before + taken, total)


def _directory_in(path: Path, name: str) -> Path | None:
    return path / name if (path / name).is_dir() else None


def _weigh_results(results: Iterable[SegmentResult]) -> Verdict:
    verdicts = {result.verdict for result in results}
    if "refuted" in verdicts:
        return "refuted"
    return "undecided" if "undecided" in verdicts or not verdicts else "proved"
