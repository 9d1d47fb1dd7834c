"""How many steps the audit log proves, checked when the page is made."""

from pathlib import Path

from phalanx.errors import PhalanxError
from phalanx.report.read import RunRecord
from phalanx.train.records.proof import verify_run

# about five signatures a recomputed microbatch: some seconds for so many steps
_MAX_STEPS = 5000


def proven_steps(run_dir: Path, record: RunRecord) -> str:
    """Return what the audit log of a run proves, in one sentence, or why it proves nothing."""
    num_steps = len(record.events_of("step"))
    if num_steps > _MAX_STEPS:
        return f"Not checked here: {num_steps} steps are on record; phalanx audit verify draws their audits again."
    if not record.events:
        return "Not proven: there is no audit log."
    try:
        proof = verify_run(run_dir)
    except PhalanxError as exc:
        return f"Not proven: {exc}."
    doubts = "".join(f" Cannot be shown: {doubt}." for doubt in proof.unproven)
    remarks = "".join(f" {remark.capitalize()}." for remark in proof.remarks)
    return f"Proven by the audit log: {proof.conclusion}.{remarks}{doubts}"
