"""The entry to training: a verified pipeline, the ranks of one domain, or clients and an enclave, by the run file."""

import os
from pathlib import Path
from typing import Any, TypeGuard

from rich.console import Console, Group, RenderableType
from rich.text import Text

from phalanx.checkpoint import Checkpoint
from phalanx.engine import check_device
from phalanx.errors import ConfigError, IsolationError, NoEvidenceError
from phalanx.interrupts import allow_interrupts
from phalanx.models import ModelSource, open_model
from phalanx.parallel.groups.rank_env import find_place
from phalanx.pipeline import LocalWorkers
from phalanx.pipeline.assignment.stage_memory import NUMBER_BYTES, boundary_bytes
from phalanx.security.invite import JoinTerms
from phalanx.security.isolation import Program, Sandbox, start_isolated
from phalanx.security.tee import find_kind, load_policy
from phalanx.split.config import HARDWARE_TIERS
from phalanx.telemetry.parties import size_in_words
from phalanx.train.batches.epochs import describe_length, settle_steps
from phalanx.train.config import (
    DomainRun,
    FederatedRun,
    PipelineRun,
    RunConfig,
    SplitPipelineRun,
    SplitRun,
    StagedRun,
    load_run,
)
from phalanx.train.data_outlook import data_outlook
from phalanx.train.records.policy_facts import open_policy
from phalanx.train.records.run_directory import RunDirectory, cache_beside, default_directory, kept_preparations
from phalanx.train.sessions.cluster import OpenWorkers
from phalanx.train.sessions.context import StartingPoint
from phalanx.train.sessions.continue_from import open_origin
from phalanx.train.sessions.factory import EngineFactory
from phalanx.train.sessions.hooks import OnValidation
from phalanx.train.sessions.pipeline import PipelineFactory
from phalanx.train.sessions.session import Session
from phalanx.train.setup.layout import make_plan
from phalanx.train.setup.preflight import check_inputs, load_own_code
from phalanx.train.setup.process import deterministic_kernels
from phalanx.train.setup.stage_table import WORKER_BYTES, describe_stages, estimate_stages

_PROBE = "phalanx.security.isolation.probe"
_PROBE_S = 30.0
_NEEDS_NETWORK = "its sandbox has no network, but workers listen on one"


def settle_tier(run: RunConfig) -> RunConfig:
    """Return the run with the tier that "auto" stands for here; any other run as it is."""
    if not isinstance(run, SplitRun) or run.split.tier != "auto":
        return run
    split = run.split
    # a sandboxed enclave reaches no workers
    lacking = _NEEDS_NETWORK if isinstance(run, SplitPipelineRun) else None
    tier = _best_tier(
        split.policy, simulates=split.mode == "plaintext", may_simulate=split.allow_insecure_sim, lacking=lacking
    )
    changes = {"tier": tier, "allow_insecure_sim": split.allow_insecure_sim and tier == "sim"}
    return run.model_copy(update={"split": split.model_copy(update=changes)})


def _best_tier(policy: str | None, *, simulates: bool, may_simulate: bool, lacking: str | None = None) -> str:
    if simulates:
        # an enclave of a plaintext split is not asked for evidence
        return "sim"
    accepted = () if policy is None else load_policy(Path(policy))[1].evidence_kinds
    for tier in HARDWARE_TIERS:
        # a TPM may be a program at another address
        if tier in accepted and (tier == "tpm" or _offers(tier)):
            return tier
    lacking = lacking or cannot_confine()
    if lacking is None:
        return "process"
    if not may_simulate:
        raise ConfigError(
            'split.tier = "auto": split.policy has no section for hardware of this machine, and it cannot confine a '
            f"process ({lacking}); enrol a TPM with phalanx enclave enrol, or set allow_insecure_sim = true"
        )
    return "sim"


def _offers(kind: str) -> bool:
    try:
        return find_kind() == kind
    except NoEvidenceError:
        return False


def cannot_confine() -> str | None:
    """Say why no program can be confined on this machine; None where one can."""
    try:
        with start_isolated(Program(_PROBE), Sandbox(), _PROBE_S) as process:
            process.wait(_PROBE_S)
    except IsolationError as exc:
        return str(exc)
    return None


def train(
    run: RunConfig,
    run_dir: str | Path | None = None,
    *,
    resume: bool = False,
    from_step: int | None = None,
    from_run: str | Path | None = None,
    ranks: int | None = None,
    console: Console | None = None,
    open_workers: OpenWorkers | None = None,
    on_validation: OnValidation | None = None,
) -> dict[str, Any]:
    """Train by a run file.

    Args:
        run_dir: Directory of all output; ``runs/NAME`` when left out.
        resume: Go on from the last good checkpoint in `run_dir`; a run that is complete is left as it is.
        from_step: With `resume`: give up the checkpoints of later steps and go on from this step's.
        from_run: Begin a new run where the one in this directory is; stages, copies, guard and layout may be others.
        ranks: Number of ranks of a domain to start here, where the run file allows several.
        console: Shows the progress; standard output when left out.
        open_workers: Starts local workers; for drills only, as `phalanx.lab.attacks.attackers_of` makes it.
        on_validation: Called after each validation, when the step is recorded and saved, with the number of finished
            steps and the result; a KeyboardInterrupt that it raises ends the run as Ctrl-C does.

    Returns:
        What ``summary.json`` holds, and ``run_dir``. Ctrl-C and SIGTERM end a run with the status "interrupted".

    Raises:
        PhalanxError: As the tree in `phalanx.errors` says; once the run has begun, a summary with the status
            "failed" is left behind.
    """
    if from_step is not None and not resume:
        raise ConfigError("--from-step names a checkpoint of an existing run; add --resume")
    if from_run is not None and resume:
        raise ConfigError("--from begins a new run, --resume continues an old one; remove one of them")
    if isinstance(run, SplitRun) and (from_step is not None or from_run is not None):
        raise ConfigError(
            "--from and --from-step need an earlier sealed state, but an enclave opens only the newest; begin a "
            "new run, or use --resume"
        )
    if isinstance(run, FederatedRun) and from_run is not None:
        raise ConfigError("--from is not supported with [federated]; set model.path to the export of the other run")
    if ranks is not None and not isinstance(run, DomainRun):
        raise ConfigError("--ranks needs a run with [parallel] and without sites; remove it")
    if isinstance(run, StagedRun) and run.attack.kind != "none" and open_workers is None:
        raise ConfigError(
            "attack: this command starts honest workers only; use `phalanx train` or `phalanx attack`, or in "
            "Python train(run, open_workers=phalanx.lab.attacks.attackers_of(run.attack))"
        )
    check_inputs(run)
    check_device(run.train.device, "train.device")
    run = settle_tier(run)
    with deterministic_kernels(run.train.threads), allow_interrupts():
        # before the directory of the new run is made: a refusal leaves nothing behind
        console = console or Console()
        try:
            given_run, run = run, settle_steps(run, cache_beside(_run_directory(run, run_dir)))
            length_note = describe_length(given_run, run)
            if length_note is not None:
                _print_plain(console, length_note)
            origin = (
                None if from_run is None else open_origin(run, Path(from_run), lambda text: _print_plain(console, text))
            )
        except KeyboardInterrupt:
            kept = kept_preparations(_run_directory(run, run_dir))
            console.print(f"interrupted while preparing; {kept}", markup=False, highlight=False, soft_wrap=True)
            raise
        policy = open_policy(run, cache_beside(_run_directory(run, run_dir)))
        beginning = StartingPoint(from_step, origin)
        with RunDirectory(_run_directory(run, run_dir), run, resume=resume) as home:
            if policy is not None:
                policy.keep_copy(home.path, is_new=home.begun_anew or not resume)
            if home.begun_anew:
                console.print(f"{home.path}: an earlier start finished no step; the run begins again", markup=False)
            factory = _factory_of(run, open_workers or LocalWorkers, ranks)
            return Session(run, home, console, factory, beginning, on_validation=on_validation).run_session(
                resume=resume
            )


def replay(
    run: RunConfig, run_dir: str | Path, origin: Checkpoint | None, console: Console | None = None
) -> dict[str, Any]:
    """Train a new run from a verified checkpoint of another, whose data may differ from there on.

    Args:
        origin: Names where in the order of the new data it goes on; None begins anew.
    """
    if origin is None:
        return train(run, run_dir, console=console)
    check_inputs(run)
    policy = open_policy(run, cache_beside(Path(run_dir)))
    with (
        deterministic_kernels(run.train.threads),
        allow_interrupts(),
        RunDirectory(Path(run_dir), run, resume=False) as home,
    ):
        if policy is not None:
            policy.keep_copy(home.path, is_new=True)
        factory = _factory_of(run, LocalWorkers, None)
        session = Session(run, home, console or Console(), factory, StartingPoint(None, origin))
        return session.run_session(resume=False)


def close_run(run_dir: Path, console: Console | None = None) -> dict[str, Any]:
    """Close the last session of a run whose process was killed: the log tells its audit key, and its end is signed.

    Returns:
        What ``summary.json`` holds; its totals are those of the newest checkpoint.

    Raises:
        ConfigError: An enclave, or sites, have secrets of the run: it can only be resumed.
        AuditLogError: A process is at work there, or the log is broken.
    """
    run = load_run(run_dir / "config.toml")
    if not isinstance(run, PipelineRun | DomainRun):
        raise ConfigError(f"{run_dir}: the session of an enclave, or of sites, ends with --resume alone")
    with RunDirectory(run_dir, run, resume=True) as home:
        return Session(run, home, console or Console(), _factory_of(run, LocalWorkers, None)).close_killed()


def _print_plain(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False)


def plays_rank(run: RunConfig) -> TypeGuard[DomainRun]:
    """Whether this process was started to be a rank other than 0, which leaves the run directory alone."""
    place = find_place(os.environ) if isinstance(run, DomainRun) else None
    return place is not None and not place.is_lead


def join_as_rank(run: DomainRun, run_dir: str | Path | None = None) -> None:
    """Be a rank other than 0 until the run is over."""
    from phalanx.train.sessions.domain import play_rank  # noqa: PLC0415 - a pipeline has no use for it

    load_own_code(run)
    cache = cache_beside(_run_directory(run, run_dir))
    with deterministic_kernels(run.train.threads):
        play_rank(settle_steps(run, cache), cache / "models")


def describe_run(run: RunConfig, run_dir: str | Path | None = None) -> RenderableType:
    """The config where it differs from defaults, the stages with their memory, and what the data at hand come to."""
    check_inputs(run)
    check_device(run.train.device, "train.device")
    run = settle_tier(run)
    cache = cache_beside(_run_directory(run, run_dir))
    given_run, run = run, settle_steps(run, cache)
    open_policy(run, cache)
    source = open_model(run.model, cache / "models", run.train.seed)
    length_note = describe_length(given_run, run)
    lines = [] if length_note is None else [Text(length_note)]
    return Group(_describe_engine(run, source, cache), *lines, data_outlook(run, source, cache))


def _describe_engine(run: RunConfig, source: ModelSource, cache: Path) -> RenderableType:
    match run:
        case PipelineRun():
            return describe_stages(run, source)
        case DomainRun():
            from phalanx.train.sessions.domain import describe_domain  # noqa: PLC0415 - a pipeline has no use for it

            return describe_domain(run, source)
        case SplitRun():
            from phalanx.train.sessions.split import describe_split  # noqa: PLC0415 - other runs have no use for it

            return describe_split(run, source)
        case FederatedRun():
            from phalanx.train.sessions.federated import describe_federated  # noqa: PLC0415 - as above

            return describe_federated(run, source, cache)


def join_terms(run: StagedRun) -> JoinTerms:
    """What a machine that joins a run is asked to do; the model is opened for its shapes."""
    check_inputs(run)
    cache = cache_beside(_run_directory(run, None))
    source = open_model(run.model, cache / "models", run.train.seed)
    plan, rows = make_plan(run, source), estimate_stages(run, source)
    middle = rows[1:-1]
    served = max((row.memory_bytes for row in middle), default=0)
    shadowed = max((row.shadow_bytes for row in middle), default=0)
    gradient = NUMBER_BYTES * max((row.trainable for row in middle), default=0) if run.guard.sends_gradient else 0
    asks = (
        f"serve or shadow some of {run.pipeline.stages} stages of a {source.hub_config.model_type} with "
        f"{source.num_layers} layers, for {run.train.length_text}; guard: {run.guard.mode}",
        f"provide memory: up to {size_in_words(served)} for a stage that you serve, {size_in_words(shadowed)} for a "
        f"stage that you shadow, and about {size_in_words(WORKER_BYTES)} for the process",
        f"send and receive about {size_in_words(2 * boundary_bytes(plan) + gradient)} a step and stage",
        "see hidden states of the text between two layers, their gradients, and the weights of your stages: parts "
        "of the text can be reconstructed from them; this machine needs neither text nor a model",
        "hand over your stages with Ctrl-C or SIGTERM at any time",
    )
    return JoinTerms(run.pipeline.transport.port, asks, (served + WORKER_BYTES) // 2**20 + 1)


def _factory_of(run: RunConfig, open_workers: OpenWorkers, ranks: int | None) -> EngineFactory[Any]:
    match run:
        case PipelineRun():
            return PipelineFactory(open_workers)
        case DomainRun():
            from phalanx.train.sessions.domain import DomainFactory  # noqa: PLC0415 - a pipeline has no use for it

            return DomainFactory(ranks)
        case SplitRun():
            from phalanx.train.sessions.split import SplitFactory  # noqa: PLC0415 - other runs have no use for it

            return SplitFactory(open_workers)
        case FederatedRun():
            from phalanx.train.sessions.federated import FederatedFactory  # noqa: PLC0415 - as above

            return FederatedFactory()


def _run_directory(run: RunConfig, run_dir: str | Path | None) -> Path:
    return Path(run_dir) if run_dir is not None else default_directory(run)
