"""``phalanx audit``: check offline what a run wrote down about its parties."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.console import say_figures
from phalanx.errors import AuditLogError, CertificateError

if TYPE_CHECKING:
    from phalanx.security.audit import LogHead
    from phalanx.security.crypto import Peer

OWNER_CERTIFICATE = "pki/owner/certificate.pem"

audit_app = typer.Typer(no_args_is_help=True, help="Check an audit log, or explain the evidence of one verdict.")


@audit_app.command(
    epilog="Example: phalanx audit verify runs/first\n\n"
    "Example: phalanx audit verify runs/first --certificate pinned/owner.pem"
)
def verify(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory, finished or not.")],
    certificate: Annotated[
        Path | None,
        typer.Option("--certificate", metavar="FILE", help="The owner's certificate, kept by you."),
    ] = None,
) -> None:
    """Check every line of events.jsonl and name the first broken one.

    Without --certificate the owner's key is the one in the run directory: the check then finds every
    change except one by somebody who replaced log, summary and key together.
    """
    from phalanx.security.audit import verify_log

    owner = _owner(certificate or run_dir / OWNER_CERTIFICATE)
    summary = verify_log(run_dir / "events.jsonl", owner, expected=_expected_head(run_dir / "summary.json"))
    say_figures(
        {
            "verdict": "every line is signed, in order and unchanged",
            "run": summary.run,
            "signed by": f"{owner.name} {owner.public_key.hex()}",
            "key from": certificate or "the run directory itself",
            "events": summary.num_events,
            "first": summary.first_time,
            "last": summary.last_time,
            **{f"  {kind}": number for kind, number in sorted(summary.kinds.items())},
        }
    )


@audit_app.command(epilog="Example: phalanx audit explain runs/first/evidence/step-00000012-stage-1-worker-1.json")
def explain(
    evidence_file: Annotated[Path, typer.Argument(metavar="FILE", help="The evidence of one verdict.")],
    authority: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The authority's certificate, kept by you.")
    ] = None,
    session: Annotated[
        str | None, typer.Option(metavar="NAME", help="The session's name, as the audit log has it.")
    ] = None,
) -> None:
    """Check the evidence of one verdict, offline, and say who is guilty of what."""
    from phalanx.pipeline import explain_evidence

    say_figures(explain_evidence(evidence_file, authority, session))


def _owner(path: Path) -> "Peer":
    from phalanx.security.crypto import certificate_facts

    try:
        facts = certificate_facts(path.read_bytes(), str(path))
    except OSError as exc:
        raise CertificateError(f"{path}: cannot be read ({exc.strerror}); give --certificate FILE") from exc
    # the dates are not judged: a log must stay readable long after its signer's certificate has ended
    if facts.peer is None:
        raise CertificateError(f"{path}: is an authority's certificate, expected the owner's")
    return facts.peer


def _expected_head(path: Path) -> "LogHead | None":
    from phalanx.security.audit import LogHead

    if not path.exists():
        return None
    try:
        head = json.loads(path.read_bytes())["audit_log_head"]
        return LogHead(int(head["num_events"]), str(head["digest"]))
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise AuditLogError(
            f"{path}: has no readable audit_log_head, so a cut-off log could not be told from a whole one"
        ) from exc
