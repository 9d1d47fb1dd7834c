"""``phalanx audit``: check offline the records of a run about its parties."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures
from phalanx.errors import AuditLogError

if TYPE_CHECKING:
    from phalanx.train.records.proof import RunProof

_NOT_PROVED = 7
"""Exit code of evidence that proves and refutes nothing by itself."""

audit_app = typer.Typer(no_args_is_help=True, help="Check or close an audit log, or explain the evidence of a verdict.")


@audit_app.command(
    epilog="Example: phalanx audit verify runs/first\n\n"
    "Example: phalanx audit verify runs/first --certificate pinned/owner.pem\n\n"
    "Example: phalanx audit verify runs/first --head worker/log_heads/RUN-KEY.json"
)
def verify(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run directory, finished or not.")],
    certificate: Annotated[
        Path | None,
        typer.Option("--certificate", metavar="FILE", help="Copy of the owner's certificate that you keep."),
    ] = None,
    head: Annotated[
        list[Path] | None,
        typer.Option("--head", metavar="FILE", help="Log head that a worker saved; may be repeated."),
    ] = None,
) -> Answer:
    """Check every line of events.jsonl, draw the audits of every step again, and check that all were done.

    Without --certificate the owner's key is the one in the run directory: the check then finds every change except
    one that replaced log, leaves, summary and key together. With --head the log must reach as far as a worker
    remembers: the owner itself can take no line back. Exit code 5 also where everything that is there holds and
    something is missing: the log's end, or the key that the audits were drawn with.
    """
    from phalanx.train.records.owner_key import owner_of
    from phalanx.train.records.run_directory import owner_certificate

    # a mistake is said before torch is imported
    owner_of(certificate or owner_certificate(run_dir))
    from phalanx.train.records.proof import verify_run

    proof = verify_run(run_dir, certificate, head or [])
    log = proof.log
    print_figures(
        {
            "verdict": "every line is signed, in order and unchanged",
            "proves": proof.conclusion,
            **{f"  {name}": rate for name, rate in proof.rates.items()},
            "  audits, signed by both": proof.audits,
            "  audits, owner's word": proof.owners_audits,
            "  audits, unequal classes": proof.unlike_audits,
            **{f"  remark {n}": remark for n, remark in enumerate(proof.remarks, 1)},
            "run": log.run,
            "signed by": f"{proof.owner.name} {proof.owner.public_key.hex()}",
            "key from": proof.key_from,
            "events": log.num_events,
            "first": log.first_time,
            "last": log.last_time,
            **{f"  {kind}": number for kind, number in sorted(log.kinds.items())},
        }
    )
    unproven = AuditLogError(f"{run_dir}: not proven: {'; '.join(proof.unproven)}") if proof.unproven else None
    return Answer(_proof_facts(proof), error=unproven)


@audit_app.command(epilog="Example: phalanx audit close runs/first")
def close(run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run with a killed process.")]) -> Answer:
    """Close the last session of a run that was killed: tell the key that its audits were drawn with, and sign the end.

    Strangers can then draw every audit again. --resume goes on afterwards, with a new key. After a crash of the whole
    machine resume first: workers of other machines may know lines that the log lost.
    """
    from phalanx.train.records.run_directory import run_name

    # a mistake is told before torch is imported
    run_name(run_dir)
    from phalanx.train.entry import close_run

    summary = close_run(run_dir)
    head = summary["audit_log_head"]
    print_figures({"status": summary["status"], "log ends with line": head["num_events"], "digest": head["digest"]})
    return Answer({"status": summary["status"], "audit_log_head": head, "run_dir": run_dir})


def _proof_facts(proof: "RunProof") -> dict[str, Any]:
    log = proof.log
    names = ("rates", "audits", "owners_audits", "unlike_audits", "remarks", "unproven", "in_doubt", "key_from")
    facts = {"proves": proof.conclusion, **{name: getattr(proof, name) for name in names}, "run": log.run}
    facts |= {"signed_by": proof.owner.name, "key": proof.owner.public_key.hex(), "events": log.num_events}
    return facts | {"first": log.first_time, "last": log.last_time, "kinds": log.kinds}


@audit_app.command(
    epilog="Example: phalanx audit explain runs/first/evidence/step-00000012-stage-1-worker-1.json\n\n"
    "Example: phalanx audit explain runs/aligned/evidence/rollouts-00000003-writer-1.json --authority pki/authority.pem"
)
def explain(
    evidence_file: Annotated[Path, typer.Argument(metavar="FILE", help="Evidence file of one verdict.")],
    authority: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Copy of the authority's certificate that you keep.")
    ] = None,
    session: Annotated[str | None, typer.Option(metavar="NAME", help="Session name in the audit log.")] = None,
) -> Answer:
    """Check the evidence of one verdict, offline, and name the guilty party and its lie.

    Ends with 0 where the file proves the verdict, with 5 where it refutes it, and with 7 where this file alone does
    neither: the rest is the owner's word.
    """
    from phalanx.pipeline.evidence.explain import UNPROVED
    from phalanx.serve.stages import explain_served_evidence

    facts = explain_served_evidence(evidence_file, authority, session)
    print_figures(facts)
    return Answer(facts, exit_code=_NOT_PROVED if facts["conclusion"] == UNPROVED else 0)
