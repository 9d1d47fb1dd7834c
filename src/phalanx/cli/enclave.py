"""``phalanx enclave``: ask for attestation evidence, appraise it offline, and be an enclave."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_line
from phalanx.cli.enclave_attest import ATTEST_EXAMPLES, attest
from phalanx.cli.enclave_enrol import ENROL_EXAMPLES, enrol
from phalanx.cli.enclave_pack import pack
from phalanx.cli.files import read_file
from phalanx.errors import ConfigError

if TYPE_CHECKING:
    from phalanx.security.tee import Evidence


SERVE_EXAMPLES = (
    "Example: phalanx enclave serve run.toml --identity enclave --dir enclave-state\n"
    "\nExit codes: 0 the owner ended the run, 2 wrong run file, 3 wrong model, 4 cannot listen, 5 wrong keys, tier or "
    "sandbox."
)
_FILE = typer.Argument(metavar="ENCLAVE.toml", help="The run's config file.")


def serve(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="Run file, the same for all parties.")],
    identity: Annotated[Path, typer.Option(help="Directory of the enclave's keys and certificate.")] = Path("enclave"),
    directory: Annotated[
        Path, typer.Option("--dir", help="Directory for the key of sealed states; a new one for each run.")
    ] = Path("enclave-state"),
    bind: Annotated[str | None, typer.Option(help="Address to listen on; default: split.remote_enclave.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; default: split.remote_enclave.")] = None,
) -> Answer:
    """Serve as the enclave of a run with [split] and remote clients, until its owner ends the run."""
    from phalanx.train.parties.enclave_process import EnclaveStart, read_enclave_run, serve_enclave

    start = EnclaveStart(identity, directory, bind, port)
    serve_enclave(read_enclave_run(run_file, start), start, print_line)
    return Answer({"status": "complete"})


def local(enclave_file: Annotated[Path, _FILE]) -> None:
    """Serve as the enclave of a local run with [split]; the run starts and ends this command."""
    from phalanx.child import die_with_parent, write_stacks_on_request
    from phalanx.config import load_config
    from phalanx.split.processes.local_enclave import EnclaveConfig
    from phalanx.split.roles.serving import serve_enclave

    write_stacks_on_request()
    die_with_parent()
    serve_enclave(load_config(enclave_file, EnclaveConfig))


def own(enclave_file: Annotated[Path, _FILE]) -> None:
    """Serve as the enclave of a run with [split] and [pipeline]; the run starts and ends this command."""
    from phalanx.child import die_with_parent, write_stacks_on_request
    from phalanx.config import load_config
    from phalanx.train.sessions.enclave_owner import EnclaveOwnerConfig, serve_owner

    write_stacks_on_request()
    die_with_parent()
    serve_owner(load_config(enclave_file, EnclaveOwnerConfig))


enclave_app = typer.Typer(
    no_args_is_help=True,
    help="Serve as the enclave of a run; produce evidence of trusted hardware, and appraise it offline.",
)
_EVIDENCE = typer.Argument(metavar="EVIDENCE", help="Evidence file, as written by pack.")


@enclave_app.command(
    epilog="Example: phalanx enclave appraise evidence.json --policy policy.toml\n"
    "\nExample: phalanx enclave appraise old.json --policy policy.toml --at 2025-06-20T00:00:00Z --json\n"
    "\nExit codes: 0 accepted, 2 wrong policy, 3 unreadable file, 5 refused."
)
def appraise(
    evidence: Annotated[Path, _EVIDENCE],
    policy: Annotated[
        Path, typer.Option(metavar="POLICY.toml", help="Policy: reference values, roots, nonce and key.")
    ],
    at: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time of the appraisal in ISO 8601; default: now.")
    ] = None,
) -> Answer:
    """Accept evidence or refuse it with one reason; the policy's [expect] names its required binding."""
    from phalanx.cli.console import print_figures
    from phalanx.errors import RefusedEvidenceError
    from phalanx.security.tee import appraise_evidence, load_policy

    rules, config = load_policy(policy)
    if config.expect is None:
        raise ConfigError(
            f"{policy}: [expect] is missing; add it, because without nonce and key old evidence would be accepted"
        )
    expected, now = config.expect.build_expected(), _parse_moment(at)
    try:
        result = appraise_evidence(_load_evidence(evidence), rules, expected, now).to_json()
    except RefusedEvidenceError as exc:
        return Answer({"accepted": False, "reason": exc.reason, "detail": exc.detail}, error=exc)
    print_figures({"verdict": "accepted", **{name: value for name, value in result.items() if name != "accepted"}})
    return Answer(result)


@enclave_app.command(epilog="Example: phalanx enclave measure evidence.json > reference.toml")
def measure(evidence: Annotated[Path, _EVIDENCE]) -> Answer:
    """Print the measurements in evidence as a policy's section, WITHOUT judging the evidence."""
    from phalanx.cli.console import print_line
    from phalanx.security.tee import inspect_evidence

    parsed_evidence = _load_evidence(evidence)
    measured = inspect_evidence(parsed_evidence)
    typer.echo("# read but not appraised: compare each value with one that you computed yourself")
    typer.echo(f"[{parsed_evidence.kind.replace('-', '_')}.measurements]")
    for name, value in measured.items():
        print_line(f'"{name}" = ["{value}"]')
    return Answer({"kind": parsed_evidence.kind, "appraised": False, "measurements": measured})


enclave_app.command(epilog=ATTEST_EXAMPLES)(attest)
enclave_app.command(epilog=ENROL_EXAMPLES)(enrol)
enclave_app.command(
    epilog="Example: phalanx enclave pack report.bin --kind snp --add vcek=vcek.der --add chain=ark.pem --out e.json"
)(pack)
enclave_app.command(epilog=SERVE_EXAMPLES)(serve)
enclave_app.command(epilog="Example: phalanx enclave local enclave.toml")(local)
enclave_app.command(epilog="Example: phalanx enclave own enclave.toml")(own)


def _load_evidence(path: Path) -> "Evidence":
    from phalanx.security.tee import parse_evidence

    return parse_evidence(read_file(path))


def _parse_moment(text: str | None) -> datetime:
    from phalanx.security.crypto import steady_now

    if text is None:
        return steady_now()
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as exc:
        raise ConfigError(f"--at {text}: expected a time such as 2026-06-01T12:00:00Z").with_facts(
            code="PHX-C002", key="--at", found=text
        ) from exc
    if moment.tzinfo is None:
        raise ConfigError(f"--at {text}: has no time zone; add Z for UTC").with_facts(
            code="PHX-C002", key="--at", found=text
        )
    return moment
