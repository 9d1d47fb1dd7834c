"""The last checkpoint of a run whose audits hold, for a server to go back to."""

from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint import step_directory
from phalanx.errors import AuditLogError, CheckpointError, VerificationError
from phalanx.security.audit import LogEntry, verify_log
from phalanx.serve.engine.hosted_model import digest_with_int8
from phalanx.serve.where import open_text_model
from phalanx.train import PastRun
from phalanx.train.records.audit_trail import LOG_FILE
from phalanx.train.records.proof import RunProof, verify_run

_OPENINGS = ("run_started", "run_resumed")


@dataclass(frozen=True)
class CertifiedModel:
    """A checkpoint that a server may go back to.

    Attributes:
        digests: Digests of its model as servers show them, in float and in int8.
        proof: The conclusion of the audit log about the steps, one sentence.
        skipped: One sentence for each newer checkpoint that was not taken.
    """

    checkpoint: Path
    step: int
    digests: tuple[str, ...]
    proof: str
    skipped: tuple[str, ...]


def find_certified(
    run_dir: Path, certificate: Path | None = None, *, before: int | None = None, own_code: bool = False
) -> CertifiedModel:
    """Find the newest checkpoint that the run's signed log certifies and that no convicted party's work is in.

    Args:
        certificate: The owner's, kept by the caller; that of the run directory when left out, which whoever has
            exchanged log, checkpoints and certificate together has exchanged too.
        before: Take only checkpoints of less steps.
        own_code: Code of the user's own that the run directory keeps may be run.

    Raises:
        AuditLogError: The log or an audit does not hold, or audits cannot be shown.
        CheckpointError: No checkpoint is left; says why each was not taken.
    """
    proof = verify_run(run_dir, certificate)
    if proof.unproven:
        raise AuditLogError(f"{run_dir}: not proven, so no checkpoint is certified: {'; '.join(proof.unproven)}")
    past = PastRun(run_dir, certificate)
    first_doubt = _first_doubt(run_dir, past, proof)
    skipped: list[str] = []
    for step in past.certified_steps:
        if before is not None and step >= before:
            skipped.append(f"step {step}: not before step {before}")
            continue
        if first_doubt is not None and step > first_doubt:
            skipped.append(f"step {step}: holds work in doubt from step {first_doubt} on")
            continue
        checkpoint = past.checkpoints / step_directory(step)
        try:
            model = open_text_model(checkpoint, certificate=certificate, own_code=own_code)
        except (CheckpointError, VerificationError) as exc:
            skipped.append(f"step {step}: {exc}")
            continue
        digests = (model.model_digest, digest_with_int8(model.model_digest))
        return CertifiedModel(checkpoint.resolve(), step, digests, proof.conclusion, tuple(skipped))
    reasons = "; ".join(skipped) or "the log lists none"
    raise CheckpointError(f"{run_dir}: no certified checkpoint is left: {reasons}")


def _first_doubt(run_dir: Path, past: PastRun, proof: RunProof) -> int | None:
    """Return the first step with work of a convicted party that nobody has recomputed; None for none.

    Raises:
        CheckpointError: A party was convicted, and the log does not say yet which of its steps are in doubt.
    """
    if not proof.in_doubt:
        return None
    steps: list[int] = []

    def visit(line: LogEntry) -> None:
        if line.kind in _OPENINGS:
            steps.clear()
        elif line.kind == "in_doubt":
            steps.append(line.body["steps"][0][0])

    verify_log(run_dir / LOG_FILE, past.owner, run=past.run_id, visit=visit)
    if not steps:
        raise CheckpointError(f"{run_dir}: {'; '.join(proof.in_doubt)}; end the run first: phalanx train --resume")
    return min(steps)
