"""``phalanx audit``: check offline the records of a run about its parties."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures, print_line
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
    something is missing: the log's end, or the key that the audits were drawn with. 0 for the whole log of a run
    without a guard, too, which proves no step: there `phalanx verify` ends with 7.
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


@audit_app.command(
    epilog="Example: phalanx audit stamp runs/first --server URL --authority tsa.pem --out head.json\n\n"
    "Example: phalanx verify first.passport --head head.json --timestamp-authority tsa.pem"
)
def stamp(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run directory, also of a run that is running.")],
    *,
    server: Annotated[str, typer.Option("--server", metavar="URL", help="Server of time stamps (RFC 3161).")],
    authority: Annotated[
        Path, typer.Option("--authority", metavar="FILE", help="Root certificates of the server, PEM.")
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="File for the signed head; its time stamp is FILE.tsr.")
    ],
    policy: Annotated[
        str | None, typer.Option("--policy", metavar="OID", help="Policy that the stamp must name.")
    ] = None,
) -> Answer:
    """Sign the present end of a run's log, and have a server of time stamps say when it existed.

    The server sees a digest of the head, and nothing else. Where its answer does not hold, nothing is written.
    """
    from phalanx.cli.files import read_file
    from phalanx.cli.parties.witness_log import open_owner
    from phalanx.config import canonical_json
    from phalanx.security.audit import LogHead, sign_head
    from phalanx.security.witness import STAMP_SUFFIX, HistoryCopy, TimestampAuthority, replace_synced
    from phalanx.train.records.run_directory import run_name

    run, (owner, _) = run_name(run_dir), open_owner(run_dir)
    trusted = TimestampAuthority(read_file(authority), policy)
    entries = HistoryCopy.from_events(run_dir / "events.jsonl", owner.public, run).entries
    if not entries:
        raise AuditLogError(f"{run_dir}: the log has no line yet")
    content = canonical_json(sign_head(owner, run, LogHead(len(entries), entries[-1].hex())))
    answer, checked = trusted.request_timestamp(server, content)
    replace_synced(out, content)
    replace_synced(out.with_name(out.name + STAMP_SUFFIX), answer)
    facts = {"line": len(entries), "existed": checked.time.isoformat(), "policy": checked.policy}
    print_figures({"log": run, **facts, "head": str(out), "stamp": f"{out}{STAMP_SUFFIX}"})
    return Answer({"run": run, "head": out, **facts})


def _proof_facts(proof: "RunProof") -> dict[str, Any]:
    log = proof.log
    names = ("rates", "audits", "owners_audits", "unlike_audits", "remarks", "unproven", "in_doubt", "key_from")
    facts = {"proves": proof.conclusion, **{name: getattr(proof, name) for name in names}, "run": log.run}
    facts |= {"signed_by": proof.owner.name, "key": proof.owner.public_key.hex(), "events": log.num_events}
    return facts | {"first": log.first_time, "last": log.last_time, "kinds": log.kinds}


@audit_app.command(
    epilog="Example: phalanx audit reads .\n\n"
    "Example: phalanx audit reads runs/first --owner 9c2f... --head 214:5d1e..."
)
def reads(
    place: Annotated[Path, typer.Argument(metavar="DIR", help="A project with roles, or a directory below one.")],
    owner: Annotated[
        str | None, typer.Option("--owner", metavar="FINGERPRINT", help="Key that signed the first roles.")
    ] = None,
    head: Annotated[
        str | None, typer.Option("--head", metavar="N:DIGEST", help="End of the log that you saw earlier.")
    ] = None,
) -> Answer:
    """Check the access log of a project, and list who read what, who was refused, and who approved.

    Each line is signed by who acted. Without --owner the first roles are believed; without --head, and on a machine
    that has not seen the log before, a tail that was cut off is not found.
    """
    from phalanx.config import printable_text
    from phalanx.errors import ConfigError
    from phalanx.policy import find_projects, verify_access_log
    from phalanx.security.audit import LogHead

    homes = find_projects((place,))
    if not homes:
        raise ConfigError(f"{place}: neither it nor a directory above it has roles; phalanx roles sign begins them")
    number, _, digest = (head or "").partition(":")
    if head is not None and not (number.isdecimal() and digest):
        raise ConfigError("--head: expected N:DIGEST, as this command prints it")
    log = verify_access_log(homes[0], owner, None if head is None else LogHead(int(number), digest))
    rows = [
        {
            "time": entry.time,
            "kind": entry.kind,
            **{name: entry.body[name] for name in entry.body if name != "statement"},
        }
        for entry in log.entries
    ]
    for row in rows:
        text = " ".join(
            printable_text(str(row[name])) for name in ("what", "action", "call", "digest", "target") if name in row
        )
        print_line(f"{row['time']} {row['kind']} {row.get('person', '')} {row.get('command', '')} {text}")
    end = f"{log.head.num_events}:{log.head.digest}"
    print_line(f"every line is signed, in order and unchanged; the end is {end}")
    return Answer({"home": homes[0], "head": end, "events": rows})


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
