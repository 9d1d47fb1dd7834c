"""The workers that write a run's texts, started beside it; their lies are in the audit log."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from phalanx.pipeline import OWNER
from phalanx.rollouts import (
    RolloutDismissal,
    RolloutVerdict,
    RolloutWorkerConfig,
    local_rollout_workers,
    rollout_company,
)
from phalanx.security.crypto import create_authority, issue_certificate, load_identity
from phalanx.train.batches.rollouts import WriteTexts, write_alone
from phalanx.train.config import DomainRun, PipelineRun
from phalanx.train.sessions.context import SessionContext

_HOME = "writers"
_EVIDENCE = "evidence"


@contextlib.contextmanager
def open_writers(
    context: SessionContext[PipelineRun | DomainRun], others: Mapping[str, Sequence[str]] | None = None
) -> Iterator[WriteTexts]:
    """Start the workers that a run file asks for, and end them; without any, this process writes.

    Args:
        others: Commands of single workers, by name; for drills only.

    Raises:
        PeerLostError: A worker did not come.
    """
    run, settings = context.run, context.run.rollouts
    if settings is None:
        yield write_alone
        return
    home, names = context.home.path / _HOME, tuple(f"writer-{n}" for n in range(settings.workers))
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
        attention=run.model.attention,
        tolerance=settings.check.tolerance,
    )
    processes = local_rollout_workers(home, pki, template, others)
    evidence, owner = context.home.path / _EVIDENCE, load_identity(pki / OWNER)
    with rollout_company(owner, names, context.home.run_id, evidence, settings.check, processes=processes) as company:
        rules = {"workers": list(names), "rate": settings.check.rate, "authority": owner.authority_pem.decode("ascii")}
        context.log.append_event("rollout_writers", rules)

        def note(decision: RolloutVerdict | RolloutDismissal) -> None:
            is_lie = isinstance(decision, RolloutVerdict)
            context.log.append_event(
                "rollout_verdict" if is_lie else "rollout_dismissal", decision.model_dump(mode="json")
            )
            what = "lied about a text and is excluded" if is_lie else "is dismissed without a conviction"
            context.print_line(f"{decision.party} {what}: {decision.reason}")

        company.report_decision = note
        try:
            yield company.generate
        finally:
            context.figures.rollouts = {
                "convicted": {verdict.party: verdict.offence for verdict in company.verdicts},
                "left_out": {dismissal.party: dismissal.cause for dismissal in company.dismissals},
                "unanswered": dict(company.unanswered_requests),
            }
