"""The commands of ``phalanx witness`` for a log and its readers."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures, print_line, print_warnings
from phalanx.errors import AuditLogError, CertificateError

if TYPE_CHECKING:
    from phalanx.security.crypto import Identity
    from phalanx.security.witness import CheckpointSigner, HistoryCopy, SignedCheckpoint

RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run directory, also of a run that is running.")]
Policy = Annotated[
    Path,
    typer.Option("--policy", metavar="FILE", help="Keys of logs and witnesses, and the quorum (C2SP tlog-policy)."),
]
Origin = Annotated[str | None, typer.Option("--origin", metavar="NAME", help="Name of the log; default: phalanx/RUN.")]
Both = Annotated[bool, typer.Option("--both", help="Demand Ed25519 and ML-DSA-44 of the log, ML-DSA-44 of witnesses.")]


def print_keys(run_dir: RunDir, origin: Origin = None) -> Answer:
    """Print the public keys of a run's log, for witnesses and policy files; its ML-DSA-44 key is made where missing."""
    lines = [key.to_text() for key in _open_signer(run_dir, origin)[1].keys]
    for line in lines:
        print_line(line)
    return Answer({"keys": lines})


def publish_log(
    run_dir: RunDir,
    *,
    policy: Policy,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Directory that a web server publishes.")],
    origin: Origin = None,
) -> Answer:
    """Sign the present head of a run's audit log, have it cosigned, and write it with its tiles.

    Ends with 5 when the quorum is missed: the head is published nevertheless, and readers will refuse it.
    """
    from phalanx.security.witness import HistoryCopy, WitnessPolicy, publish_head

    rules, (owner, signer) = WitnessPolicy.from_file(policy), _open_signer(run_dir, origin)
    history = HistoryCopy.from_events(run_dir / "events.jsonl", owner.public, None)
    publication = publish_head(to, history, signer, rules, time.time)
    outcomes = {"/".join(report.names): report.outcome for report in publication.reports}
    figures = {"log": signer.name, "entries": len(history.entries)}
    quorum = "reached" if publication.has_quorum else "missed"
    print_figures({**figures, **{f"  {name}": outcome for name, outcome in outcomes.items()}, "quorum": quorum})
    accusations = [report.accusation for report in publication.reports if report.accusation]
    print_warnings(accusations)
    missed = None if publication.has_quorum else AuditLogError(f"{to}: the quorum of {policy} is missed")
    return Answer({**figures, "quorum": quorum, "witnesses": outcomes, "accusations": accusations}, error=missed)


def prove_line(
    run_dir: RunDir,
    *,
    source: Annotated[str, typer.Option("--from", metavar="DIR_OR_URL", help="Where the log is published.")],
    line: Annotated[int, typer.Option(min=1, help="Number of the line in events.jsonl, from 1.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The proof, usually *.tlog-proof.")],
    receipts: Annotated[
        bool, typer.Option("--receipts", help="Also write receipts of RFC 9942 (COSE), FILE.es256 and FILE.ml-dsa-44.")
    ] = False,
    origin: Origin = None,
) -> Answer:
    """Write one line of the log with the proof that it is under the published head, to be checked offline."""
    from phalanx.security.witness import LineProof, read_checkpoint, read_history, replace_synced

    signed = read_checkpoint(source)
    history = read_history(source, signed)
    with (run_dir / "events.jsonl").open("rb") as file:
        raw = next((text for number, text in enumerate(file, 1) if number == line), b"")
    proof = LineProof.from_history(history, signed, line - 1, raw.removesuffix(b"\n"))
    written: dict[str, bytes] = {}
    if receipts:
        from phalanx.governance.receipts import make_receipts

        owner, signer = _open_signer(run_dir, origin)
        written = {f"{out}.{name}": receipt for name, receipt in make_receipts(proof, owner, signer).items()}
    for name, content in {str(out): proof.to_bytes(), **written}.items():
        replace_synced(Path(name), content)
    print_line(f"{out}: line {line} of {signed.checkpoint.head.size}")
    return Answer({"file": out, "receipts": list(written), "line": line, "entries": signed.checkpoint.head.size})


def verify_line(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A proof that prove wrote.")],
    *,
    policy: Policy,
    both: Both = False,
) -> Answer:
    """Check offline that a line is in a log whose head the quorum of a policy has cosigned, and print the line."""
    from phalanx.security.witness import LineProof, WitnessPolicy

    proof = LineProof.from_bytes(_read_file(file))
    proof.check_place()
    status = WitnessPolicy.from_file(policy).demand_quorum(proof.signed, both_kinds=both)
    head = proof.signed.checkpoint.head
    figures = {"log": proof.signed.checkpoint.origin, "line": proof.index + 1, "entries": head.size}
    print_figures({**figures, "cosigned by": ", ".join(status.signed_by) or "nobody, and the policy asks for nobody"})
    print_line(proof.line.decode("utf-8", "replace"))
    return Answer({**figures, "cosigned_by": status.signed_by, "text": proof.line.decode("utf-8", "replace")})


def compare_logs(
    first: Annotated[
        str, typer.Argument(metavar="PLACE", help="Published log, one head, or a proof of two histories.")
    ],
    second: Annotated[
        str | None, typer.Argument(metavar="PLACE", help="The same log as another reader has it.")
    ] = None,
    *,
    policy: Policy,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the proof of two histories.")] = None,
) -> Answer:
    """Compare what two readers were shown, and name every log and witness that signed for both histories.

    Ends with 5 where somebody did, and the proof convinces anybody who has the keys.
    """
    from phalanx.security.witness import ForkProof, WitnessPolicy, compare_histories, replace_synced

    rules = WitnessPolicy.from_file(policy)
    if second is None:
        proof = ForkProof.from_bytes(_read_file(Path(first)))
    else:
        proof = compare_histories(_read_copy(first), _read_copy(second))
    guilty = proof.judge_signers(rules.keys)
    if guilty and out is not None:
        replace_synced(out, proof.to_bytes())
    for contradiction in guilty:
        print_line(contradiction.text)
    if not guilty:
        print_line("no contradiction between the two")
    facts = {"guilty": [{"name": entry.key.name, "kind": entry.kind, "key": entry.key.to_text()} for entry in guilty]}
    return Answer(facts, error=AuditLogError(f"{guilty[0].text}") if guilty else None)


def mirror_log(
    home: Annotated[Path, typer.Argument(metavar="HOME", help="Keys of the mirror, as witness init makes them.")],
    source: Annotated[str, typer.Argument(metavar="URL", help="Where the log is published.")],
    copy: Annotated[Path, typer.Argument(metavar="DIR", help="The copy, for another web server.")],
    *,
    policy: Policy,
) -> Answer:
    """Copy a published log as a whole, where it continues the copy, and sign its head as one that is stored here."""
    from phalanx.security.witness import Witness, WitnessPolicy, mirror_history, replace_synced, write_tiles

    keys = [log.key for log in WitnessPolicy.from_file(policy).logs]
    # whoever signs by these keys remembers it in one place: a mirror signs nothing that the witness would not
    with Witness(home, unix_time=time.time) as witness:
        signed, history = mirror_history(source, copy, keys)
        witness.check_history(signed, history)
        num_files = write_tiles(copy, history, len(history.entries))
        signed = witness.cosign_history(signed, history, keys)
    replace_synced(copy / "checkpoint", signed.to_bytes())
    print_line(f"{copy}: {len(history.entries)} entries of {signed.checkpoint.origin}")
    return Answer({"copy": copy, "entries": len(history.entries), "files": num_files})


def open_owner(run_dir: Path) -> "tuple[Identity, Path]":
    """Load the owner's identity of a run, and tell where its keys are.

    Raises:
        CertificateError: They are not on this machine.
    """
    from phalanx.pipeline.config import OWNER
    from phalanx.security.crypto import load_identity

    home = run_dir / "pki" / OWNER
    if not home.exists():
        from phalanx.train.config import load_run

        pki = load_run(run_dir / "config.toml").pki
        if pki is None:
            raise CertificateError(f"{run_dir}: the owner's keys are not here; do this where the run was trained")
        home = Path(pki) / OWNER
    return load_identity(home), home


def _open_signer(run_dir: Path, origin: str | None) -> "tuple[Identity, CheckpointSigner]":
    from phalanx.security.crypto.ml_dsa import ML_DSA_KEY, load_ml_dsa_key, make_ml_dsa_key
    from phalanx.security.witness import log_signer
    from phalanx.train.records.run_directory import run_name

    owner, home = open_owner(run_dir)
    if load_ml_dsa_key(home / ML_DSA_KEY) is None:
        make_ml_dsa_key(home / ML_DSA_KEY)
    return owner, log_signer(owner, origin or f"phalanx/{run_name(run_dir)}", home)


def _read_copy(place: str) -> "tuple[SignedCheckpoint, HistoryCopy | None]":
    from phalanx.security.witness import read_checkpoint, read_history

    signed = read_checkpoint(place)
    is_log = place.startswith(("http://", "https://")) or Path(place).is_dir()
    return signed, read_history(place, signed) if is_log else None


def _read_file(path: Path) -> bytes:
    from phalanx.security.witness.proofs import MAX_PROOF_BYTES

    try:
        with path.open("rb") as file:
            return file.read(MAX_PROOF_BYTES + 1)
    except OSError as exc:
        raise AuditLogError(f"{path}: cannot be read ({exc.strerror})") from exc
