"""A session that learns from its model's texts: prompts, rewards and measurement."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from phalanx.checkpoint.export import RunTokenizer
from phalanx.data import Batch
from phalanx.data.prompts import prepare_prompts
from phalanx.data.tokenizers.tokenizer import original_tokenizer
from phalanx.errors import ConfigError, PeerLostError
from phalanx.models import ModelSource
from phalanx.models.layout import check_length, check_vocabulary
from phalanx.pipeline import OWNER
from phalanx.rewards import RewardScorer
from phalanx.rollouts import (
    PolicyModel,
    Rollout,
    RolloutCompany,
    RolloutDismissal,
    RolloutPolicy,
    RolloutRequest,
    RolloutsConfig,
    RolloutVerdict,
    RolloutWorkerConfig,
    local_rollout_workers,
    rollout_company,
)
from phalanx.security.crypto import RevokedParties, create_authority, issue_certificate, load_identity
from phalanx.train.batches.rollouts import RolloutLoader, WriteTexts, settings_of, write_alone
from phalanx.train.batches.scores import MeanReward
from phalanx.train.config import DomainRun, PipelineRun
from phalanx.train.sessions.context import SessionContext
from phalanx.train.sessions.factory import RunMaterial
from phalanx.train.sessions.hooks import TrainedModel
from phalanx.train.setup.layout import check_head

_HOME = "writers"
_EVIDENCE = "evidence"


@contextlib.contextmanager
def open_writers(
    context: SessionContext[PipelineRun | DomainRun], others: Mapping[str, Sequence[str]] | None = None
) -> Iterator[WriteTexts]:
    """Start or await the workers that a run file asks for, and end them; without any, this process writes.

    A worker that an earlier session has convicted stays out.

    Args:
        others: Commands of single workers, by name; for drills only.
    """
    settings = context.run.rollouts
    if settings is None:
        yield write_alone
        return
    is_remote, revoked = bool(settings.remote_workers), RevokedParties(Path(settings.pki or ""))
    names = settings.remote_workers or tuple(f"writer-{n}" for n in range(settings.workers))
    out = context.history.convicted_writers | (revoked.read_revocations().keys() if is_remote else set())
    for name in sorted(out.intersection(names)):
        context.print_line(f"{name}: was convicted or revoked, and writes no texts")
    if not set(names) - out:
        yield write_alone
        return
    with _open_company(context, settings, [name for name in names if name not in out], others) as company:

        def note_decision(decision: RolloutVerdict | RolloutDismissal) -> None:
            is_lie = isinstance(decision, RolloutVerdict)
            context.log.append_event(
                "rollout_verdict" if is_lie else "rollout_dismissal", decision.model_dump(mode="json")
            )
            what = "lied about a text and is excluded" if is_lie else "is dismissed without a conviction"
            context.print_line(f"{decision.party} {what}: {decision.reason}")

        def write_texts(policy: RolloutPolicy, model: PolicyModel, request: RolloutRequest) -> tuple[Rollout, ...]:
            if is_remote:
                reasons = {name: entry.reason for name, entry in revoked.read_revocations().items()}
                company.dismiss_revoked(reasons, request.step)
            return company.generate(policy, model, request)

        company.report_decision = note_decision
        try:
            yield write_texts
        finally:
            context.figures.rollouts = {
                "convicted": {verdict.party: verdict.offence for verdict in company.verdicts},
                "left_out": {dismissal.party: dismissal.cause for dismissal in company.dismissals},
                "unanswered": dict(company.unanswered_requests),
            }


@contextlib.contextmanager
def _open_company(
    context: SessionContext[PipelineRun | DomainRun],
    settings: RolloutsConfig,
    names: Sequence[str],
    others: Mapping[str, Sequence[str]] | None,
) -> Iterator[RolloutCompany]:
    home, processes = context.home.path / _HOME, None
    if settings.pki is None:
        pki = home / "pki"
        if not (pki / "authority.pem").exists():
            create_authority(pki)
        for name in (OWNER, *names):
            if not (pki / name).exists():
                issue_certificate(pki, name)
        template = RolloutWorkerConfig(
            identity="",
            owner="",
            owner_name=OWNER,
            threads=settings.threads,
            attention=context.run.model.attention,
            tolerance=settings.check.tolerance,
        )
        processes = local_rollout_workers(home, pki, template, others)
    else:
        pki = Path(settings.pki)

    def announce_address(address: str) -> None:
        if processes is None:
            context.print_line(f"waiting at {address} for those that write texts: {', '.join(names)}")

    def note_absent(name: str, fault: PeerLostError) -> None:
        decision = {"party": name, "step": 0, "cause": "lost", "reason": str(fault)}
        context.log.append_event("rollout_dismissal", decision)
        context.print_line(f"{fault}; this session goes on without it")

    with rollout_company(
        owner := load_identity(pki / OWNER),
        names,
        context.home.run_id,
        context.home.path / _EVIDENCE,
        settings.check,
        transport=settings.transport,
        processes=processes,
        announce=announce_address,
        note_absent=note_absent if processes is None else None,
    ) as company:
        rules = {"workers": list(names), "rate": settings.check.rate, "authority": owner.authority_pem.decode("ascii")}
        context.log.append_event("rollout_writers", rules)
        yield company


LOG = "rewards.log"
"""What rewards print, in the run directory."""


@contextlib.contextmanager
def rollout_material(context: SessionContext[PipelineRun | DomainRun], source: ModelSource) -> Iterator[RunMaterial]:
    """Read the prompts of a run; what computes rewards is ended with the context."""
    run, home = context.run, context.home
    if run.rewards is None:
        raise ConfigError("rewards: the section [rewards] is missing")
    check_head(run, source)
    check_length(run.data.sequence_length, getattr(source.hub_config, "max_position_embeddings", None))
    longest = settings_of(run).max_new_tokens
    prompts = prepare_prompts(run.data, home.cache_directory / "data", run.train.seed, source.tokenizer_path, longest)
    check_vocabulary(prompts.tokenizer.vocab_size, source.vocab_size)
    context.print_line(f"prompts: {len(prompts.train)} to train on, {len(prompts.held_out)} held out")
    if prompts.tokenizer.beginning_tokens and any(one.conversation is None for one in prompts.train):
        context.print_line(f"prompts begin with {prompts.tokenizer.beginning_tokens}, as the tokenizer's texts do")
    with RewardScorer(run.rewards, run.home, home.path / LOG) as scorer, open_writers(context) as write:
        loader = RolloutLoader(prompts, run, source, scorer, write)
        file = original_tokenizer(run.data.tokenizer, source.tokenizer_path) or prompts.tokenizer_path
        kept_tokenizer = RunTokenizer(file, prompts.tokenizer.eos_id, of_model=run.data.tokenizer.kind == "model")
        yield RunMaterial(source, prompts, loader, vocabulary=prompts.vocabulary_digest, tokenizer=kept_tokenizer)


class RewardedModel:
    """A trained model, measured by the rewards of its texts for held-out prompts."""

    def __init__(self, trained: TrainedModel, loader: RolloutLoader) -> None:
        self._trained = trained
        self._loader = loader

    def measure_sets(self, sets: Sequence[Iterable[Batch]]) -> list[MeanReward]:
        """The mean reward of the likeliest text to each held-out prompt."""
        return [self._loader.measure_reward() for _ in sets]

    def measure_rows(self, rows: Sequence[Batch]) -> Sequence[float]:
        """Sum of nats of each batch of one row."""
        return self._trained.measure_rows(rows)

    def settle_steps(self) -> None:
        """Wait until nothing of a finished step is under way."""
        self._trained.settle_steps()
