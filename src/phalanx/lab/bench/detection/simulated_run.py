"""A simulated company with its attackers, as one cell of `bench detection` describes it, and its result."""

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from phalanx.engine import UNGUARDED
from phalanx.errors import EvidenceError
from phalanx.lab.attacks import attack_files_in, make_actor, make_attack
from phalanx.lab.bench.detection.cell import DetectionCell
from phalanx.lab.bench.detection.cells import FIRST_ATTACKED_STEP
from phalanx.lab.bench.detection.other_paths import HonestDistances, one_party_at_a_time, wrap_on_path
from phalanx.lab.calibrate import NumericPath
from phalanx.pipeline import AttackConfig, AuditDraw, GuardConfig
from phalanx.pipeline.evidence.explain import UNPROVED, explain_evidence
from phalanx.testing import Actor, MemoryCompany
from phalanx.train import PipelineRun

_STEPS_AFTER_THE_LAST = 2
_LATEST_FIRST_LIE = 5
_HARMLESS = frozenset({"framing", "withholding", "withheld answer", "stall", "forged receipt"})
"""Lies that reach no weight, by what the attackers' log calls them."""


@dataclass(frozen=True)
class LoggedLie:
    """One line of the attackers' own log; `microbatch` is None for a lie about a whole step."""

    party: str
    stage: int
    step: int
    microbatch: int | None
    what: str | None


@dataclass(frozen=True)
class Fate:
    """The end of a party's part in a run: its step, whether it was convicted, and the step that was gone back to."""

    step: int
    convicted: bool
    undone_from: int


@dataclass
class CompanyResult:
    """The result of one company.

    Attributes:
        digest: Digest of the weights at the end; None when the run broke off.
        lies: The lies that the attackers logged, which are the ground truth.
        evidence: Offence of each verdict, and the result of `phalanx audit explain` on its file: "proved", "refuted" or
            "not_provable".
        differences: Between honest workers on different paths; None where bits must be equal, or where a party lies.
        error: Why the run broke off; None when it did not.
    """

    losses: list[float] = field(default_factory=list)
    digest: str | None = None
    lies: list[LoggedLie] = field(default_factory=list)
    events: list[tuple[str, dict[str, object]]] = field(default_factory=list)
    num_audits: int = 0
    evidence: list[tuple[str, str]] = field(default_factory=list)
    differences: HonestDistances | None = None
    error: str | None = None

    def bodies_of(self, kind: str) -> list[dict[str, object]]:
        """Return the bodies of all events of one kind."""
        return [body for name, body in self.events if name == kind]

    @property
    def party_fates(self) -> dict[str, Fate]:
        """Return the fate of each party that was evicted or lost."""
        fates: dict[str, Fate] = {}
        last = ""
        for kind, body in self.events:
            if kind in ("evicted", "lost"):
                last, step = str(body["party"]), _as_int(body["step"])
                fates[last] = Fate(step, kind == "evicted", step)
            elif kind == "rolled_back":
                fates[last] = Fate(fates[last].step, fates[last].convicted, _as_int(body["to"]))
        return fates


@dataclass
class CleanRun:
    """The result of an undisturbed run, step by step."""

    losses: list[float] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)


def run_clean(run: PipelineRun, steps: int, directory: Path, cache: Path) -> CleanRun:
    """Train without an attack and without a guard."""
    clean = CleanRun()
    with MemoryCompany(without_guard_and_attack(run), directory, cache=cache) as company:
        for _ in range(steps):
            clean.losses.append(company.run(1)[0].loss)
            clean.digests.append(company.weights_digest())
    return clean


def without_guard_and_attack(run: PipelineRun) -> PipelineRun:
    """The same training without guard and attack."""
    return run.model_copy(update={"guard": GuardConfig(mode="off"), "attack": AttackConfig()})


def play_company(cell: DetectionCell, directory: Path, cache: Path) -> CompanyResult:
    """Run a company until its attackers are evicted, or its steps are done.

    Which microbatches are audited follows from the run's seed here, so that a row can be had again.
    """
    log = directory / "attack.jsonl"
    run = cell.run.model_copy(update={"attack": lying_early(cell.run.attack)})
    outcome = CompanyResult()
    differences = HonestDistances()
    draw = AuditDraw.from_guard(run.train.seed.to_bytes(32, "big"), bytes(32), run.guard)
    company = MemoryCompany(run, directory, _make_actors(cell, run, log, differences), cache=cache, draw=draw)
    with one_party_at_a_time() if cell.paths else contextlib.nullcontext(), company:
        try:
            _run_company(company, cell.steps, log, outcome)
            outcome.digest = company.weights_digest()
        # an attack that makes the owner fall over is a finding, and the other rows are still wanted
        except Exception as exc:  # noqa: BLE001
            outcome.error = f"{type(exc).__name__}: {exc}"
    outcome.events = list(company.events)
    outcome.evidence = [
        (str(body["offence"]), _explain_offline(company.run_dir / str(body["evidence"])))
        for body in outcome.bodies_of("verdict")
    ]
    outcome.lies = read_lies(log)
    if cell.paths and run.attack.kind == "none":
        outcome.differences = differences
    return outcome


def _explain_offline(path: Path) -> str:
    """Explain the evidence of one verdict offline, as a stranger would."""
    try:
        conclusion = explain_evidence(path)["conclusion"]
    except EvidenceError:
        return "refuted"
    return "not_provable" if conclusion == UNPROVED else "proved"


def read_lies(log: Path) -> list[LoggedLie]:
    """Read the lies that the attackers have logged."""
    if not log.exists():
        return []
    records = [json.loads(row) for row in log.read_text(encoding="utf-8").splitlines()]
    return [LoggedLie(r["party"], r["stage"], r["step"], r["microbatch"], r.get("what")) for r in records]


def is_found(lie: LoggedLie, outcome: CompanyResult) -> bool:
    """Whether the guard found in this very step that something was wrong with the liar, before the step was applied."""
    fate = outcome.party_fates.get(lie.party)
    passed_on = {(body.get("source"), body.get("step")) for body in outcome.bodies_of("relayed")}
    return (fate is not None and fate.step <= lie.step) or (lie.stage, lie.step) in passed_on


def is_undone(lie: LoggedLie, outcome: CompanyResult) -> bool:
    """Whether the step was applied with the lie, and taken back when the liar was convicted."""
    fate = outcome.party_fates.get(lie.party)
    return fate is not None and fate.undone_from <= lie.step < fate.step


def first_detected_step(outcome: CompanyResult) -> int | None:
    """Return the step in which the guard first found a lie, before any rollback; None where it found none."""
    liars = {lie.party for lie in outcome.lies}
    places = {(lie.stage, lie.step) for lie in outcome.lies}
    for kind, body in outcome.events:
        is_out = kind in ("evicted", "lost") and body["party"] in liars
        if is_out or (kind == "relayed" and (body.get("source"), body.get("step")) in places):
            return _as_int(body["step"])
    return None


def accepted_lies(outcome: CompanyResult) -> list[LoggedLie]:
    """Return the lies that stay in the weights: their step was applied while the liar was there, and never undone."""
    fates, applied = outcome.party_fates, len(outcome.losses)
    return [
        lie
        for lie in outcome.lies
        if lie.what not in _HARMLESS
        and lie.step < applied
        and (lie.party not in fates or lie.step < fates[lie.party].undone_from)
    ]


def num_sequences(lies: Iterable[LoggedLie], run: PipelineRun) -> int:
    """Sequences of the microbatches that these lies are about, each counted once."""
    everything = range(run.train.microbatches)
    touched = {(lie.step, m) for lie in lies for m in (everything if lie.microbatch is None else (lie.microbatch,))}
    return len(touched) * (run.train.batch_size // run.train.microbatches)


def _make_actors(cell: DetectionCell, run: PipelineRun, log: Path, differences: HonestDistances) -> Mapping[str, Actor]:
    actors = {
        name: _path_actor(cell.paths, number, differences) for number, name in enumerate(run.pipeline.worker_names)
    }
    if run.attack.kind == "none":
        return actors
    for name in (f"worker-{stage}" for stage in run.attack.stages):
        liar, honest = make_actor(run.attack, name, log), actors[name]
        actors[name] = replace(liar, kernels=honest.kernels, description=honest.description)
    return actors


def _path_actor(paths: Sequence[NumericPath], number: int, differences: HonestDistances) -> Actor:
    if not paths:
        return Actor()
    path = paths[number % len(paths)]
    return Actor(kernels=wrap_on_path(path, differences), description=path.name)


def _run_company(company: MemoryCompany, steps: int, log: Path, outcome: CompanyResult) -> None:
    after = 0
    while len(outcome.losses) < steps and after < _STEPS_AFTER_THE_LAST:
        result = company.run(1)[0]
        outcome.losses.append(result.loss)
        outcome.num_audits += (result.guard or UNGUARDED).num_audits
        liars = {lie.party for lie in read_lies(log)}
        after += bool(liars) and liars <= {*company.evicted, *company.lost}


def lying_early(attack: AttackConfig) -> AttackConfig:
    """The same attack with the first seed that lies within the first steps, so that no company is watched in vain."""
    if attack.kind == "none" or not attack.rate:
        return attack
    voices = [make_attack(attack, f"worker-{stage}", None).seed_name for stage in attack.stages]
    steps: Sequence[int] = range(FIRST_ATTACKED_STEP, _LATEST_FIRST_LIE + 1)
    seed = attack.seed
    while not all(
        any(attack_files_in(attack.model_copy(update={"seed": seed}), v, step) for step in steps) for v in voices
    ):
        seed += 1
    return attack.model_copy(update={"seed": seed})


def _as_int(value: object) -> int:
    return int(str(value))
