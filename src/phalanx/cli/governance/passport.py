"""``phalanx passport`` and ``phalanx verify``: hand a run to strangers, and check it as one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MISSING = 7
PASSPORT_EPILOG = (
    "Example: phalanx passport runs/first --out first.passport\n\n"
    "Example: phalanx passport runs/first --out first.passport --model models/first --evaluation evaluation.json\n\n"
    f"Exit codes: 0 made, and nothing is missing, 2 wrong command line, 3 missing files, 5 the run does not hold, "
    f"{MISSING} made, but something is missing in it."
)
VERIFY_EPILOG = (
    "Example: phalanx verify first.passport --owner FINGERPRINT --model models/first\n\n"
    "Example: phalanx verify runs/first --certificate pinned/owner.pem\n\n"
    f"Exit codes: 0 it holds, 2 wrong command line, 3 unreadable, 5 refused, {MISSING} it holds, but something is "
    "missing."
)


def passport(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run directory, finished or not.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="New file.")],
    *,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="Model that you hand over; default: exported anew.")
    ] = None,
    identity: Annotated[
        Path | None, typer.Option("--identity", metavar="DIR", help="The owner's keys; default: those of the run.")
    ] = None,
    evaluation: Annotated[
        list[Path] | None,
        typer.Option("--evaluation", metavar="FILE.json", help="Result of eval; default: RUN_DIR/evaluation*.json."),
    ] = None,
    redteam: Annotated[
        list[Path] | None,
        typer.Option("--redteam", metavar="DIR", help="Report of redteam; default: RUN_DIR/redteam."),
    ] = None,
    exported: Annotated[
        list[Path] | None, typer.Option("--export", metavar="DIR", help="Directory of phalanx export.")
    ] = None,
    document: Annotated[
        list[str] | None, typer.Option("--document", metavar="DOC", help="Prove its place in the data, or absence.")
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", metavar="FILE", help="Copy of the owner's certificate.")
    ] = None,
) -> Answer:
    """Write one file of signed statements about a run: model, training, tests, data, audits, evidence, exports.

    Programs of others read its parts: OMS, SLSA, in-toto, CycloneDX. The whole run file is in it, no text of the data.
    """
    from phalanx.train.records.run_directory import run_name

    # a mistake is told before torch is imported
    run_name(run_dir)
    from phalanx.governance.passport import PassportChoice, make_passport
    from phalanx.train import PastRun

    lists = (evaluation or (), redteam or (), exported or (), document or ())
    findings = make_passport(PastRun(run_dir, certificate), out, PassportChoice(model, identity, *lists))
    rows = {"passport": str(out), "owner": findings.owner, "bytes": out.stat().st_size, **findings.rows}
    _print_findings(rows, findings.remarks, findings.doubts)
    facts = {
        "passport": out,
        "owner": findings.owner,
        "remarks": findings.remarks,
        "doubts": findings.doubts,
        **findings.facts,
    }
    return Answer(facts, exit_code=MISSING if findings.doubts else 0)


def verify(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="Passport, run, dataset, export, signed model, evidence, proof...")
    ],
    *,
    owner: Annotated[
        str | None, typer.Option("--owner", metavar="FINGERPRINT", help="Key of the owner that you expect.")
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", metavar="FILE", help="Copy of the owner's certificate.")
    ] = None,
    signer: Annotated[
        str | None, typer.Option("--signer", metavar="FINGERPRINT", help="Key that signs data or exports.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="Model that came with the passport.")
    ] = None,
    session: Annotated[str | None, typer.Option(metavar="NAME", help="Session of evidence, from the log.")] = None,
    head: Annotated[
        list[Path] | None, typer.Option("--head", metavar="FILE", help="Head of the log that others have kept.")
    ] = None,
    absent: Annotated[
        str | None,
        typer.Option("--absent", metavar="DIGEST", help="Document that a passport's model must never have seen."),
    ] = None,
    timestamp_authority: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Root certificates of time stamps that lie beside heads, as HEAD.tsr."),
    ] = None,
) -> Answer:
    """Check what you were handed, offline and without torch; the same program is published as phalanx-verify.

    A forger without the owner's keys can change nothing. Facts that rest on the owner's word are printed as remarks.
    """
    from phalanx.cli.files import read_file
    from phalanx.errors import InputError, VerificationError
    from phalanx.verifier.forms import RefusedError, UnreadableError
    from phalanx.verifier.kinds import Expectations, verify_path

    pem = None if certificate is None else read_file(certificate).decode("ascii", "replace")
    try:
        heads = tuple(map(read_file, head or ()))
        report = verify_path(path, Expectations(owner, pem, signer, model, session, heads, absent))
        stamps = _check_stamps(report.kind, head or (), heads, timestamp_authority)
    except RefusedError as exc:
        raise VerificationError(str(exc)) from exc
    except UnreadableError as exc:
        raise InputError(str(exc)) from exc
    verdict = "holds, but something is missing" if report.doubts else "holds"
    rows = {**report.rows, **{f"time stamp of {file}": text for file, text in stamps.items()}}
    _print_findings({"verdict": f"{report.kind}: {verdict}", **rows}, report.remarks, report.doubts)
    facts = {"kind": report.kind, "remarks": report.remarks, "doubts": report.doubts, **report.facts}
    facts |= {"time_stamps": stamps} if stamps else {}
    return Answer(facts, exit_code=MISSING if report.doubts else 0)


def _check_stamps(
    kind: str, files: "Sequence[Path]", heads: "Sequence[bytes]", authority: Path | None
) -> dict[str, str]:
    """Return a sentence for the time stamp beside each head of this log.

    Raises:
        AuditLogError: One does not hold.
        InputError: There is none where an authority is given, or `kind` has no log.
    """
    from phalanx.cli.files import read_file
    from phalanx.errors import InputError
    from phalanx.security.witness import STAMP_SUFFIX, TimestampAuthority

    if authority is None:
        return {}
    if not files or not kind.endswith("of a run"):
        raise InputError("--timestamp-authority: time stamps are of heads of a run's log; give --head")
    trusted, stamps = TimestampAuthority(read_file(authority)), {}
    for file, content in zip(files, heads, strict=True):
        checked = trusted.check_timestamp(read_file(file.with_name(file.name + STAMP_SUFFIX)), content)
        stamps[str(file)] = f"existed at {checked.time.isoformat()}, policy {checked.policy}"
    return stamps


def _print_findings(rows: "Mapping[str, Any]", remarks: "Sequence[str]", doubts: "Sequence[str]") -> None:
    numbered = {f"  remark {n}": text for n, text in enumerate(remarks, 1)}
    numbered |= {f"  missing {n}": text for n, text in enumerate(doubts, 1)}
    print_figures({**rows, **numbered})
