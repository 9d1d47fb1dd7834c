"""``phalanx enclave enrol``: this machine's TPM into a policy file that clients pin."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.enclave_attest import read_numbers
from phalanx.cli.files import read_file, write_text
from phalanx.errors import ConfigError

if TYPE_CHECKING:
    from phalanx.security.tee import Evidence, TpmAttester

ENROL_EXAMPLES = (
    "Example: phalanx enclave enrol --root vendor-root.pem --chain vendor-intermediate.pem --out policy.toml\n"
    "\nExample: phalanx enclave enrol --tpm swtpm:path=/run/tpm/socket --unsafe-accept-any-ek --out policy.toml\n"
    "\nExample: phalanx enclave enrol --root vendor-root.pem --client north --out north.toml\n"
    "\nExit codes: 0 written, 2 wrong command line, 3 unreadable file or TPM, 5 no vendor certified the TPM."
)


def enrol(
    *,
    out: Annotated[Path, typer.Option(metavar="FILE", help="New policy file.")],
    tpm: Annotated[
        str, typer.Option(metavar="ADDRESS", help="TPM, in the notation of tpm2-tools.")
    ] = "device:/dev/tpmrm0",
    pcrs: Annotated[str, typer.Option(help="PCRs to pin; an enclave quotes 0 to 7.")] = "0,1,2,3,4,5,6,7",
    root: Annotated[Path | None, typer.Option(metavar="PEM", help="Root certificates of the TPM's vendor.")] = None,
    chain: Annotated[
        Path | None, typer.Option(metavar="PEM", help="Certificates between the vendor's root and the TPM.")
    ] = None,
    ek: Annotated[
        Path | None, typer.Option(metavar="FILE", help="EK certificate, if the TPM does not store it.")
    ] = None,
    unsafe_accept_any_ek: Annotated[
        bool, typer.Option("--unsafe-accept-any-ek", help="Accept a TPM that no vendor certified, such as swtpm.")
    ] = False,
    client: Annotated[
        str | None, typer.Option(metavar="NAME", help="Write a run-file section: the policy of this client.")
    ] = None,
) -> Answer:
    """Pin this TPM's attestation key and the CURRENT state of the machine, for the clients of a split.

    With --root the key is shown to live in the TPM that the vendor certified. Run it on a machine that is in the state
    that you mean to accept, and carry the file to every client over a way that you trust.
    """
    from phalanx.security.tee import Binding, TpmAttester, open_tpm
    from phalanx.security.tee.tpm.structures import parse_public

    if (root is None) != unsafe_accept_any_ek:
        raise ConfigError("enrol: expected either --root, or --unsafe-accept-any-ek for a TPM that no vendor certified")
    if out.exists():
        raise ConfigError(f"{out}: already exists and may be in use; give another name").with_facts(
            code="PHX-C021", file=str(out), do="give another name"
        )
    with open_tpm(tpm) as device, TpmAttester(device, read_numbers(pcrs)) as attester:
        if root is not None:
            name = _certify_key(attester, root, chain, ek)
        else:
            name = parse_public(attester.ak_public).name.hex()
        evidence = attester.make_evidence(Binding(bytes(32), bytes(32), bytes(32)))
    section = "tpm" if client is None else f"split.client_policies.{client}.tpm"
    write_text(out, _policy_text(name, evidence, section, certified=root is not None))
    goes_to = "copy it to every client" if client is None else "the owner adds it to the run file"
    typer.echo(f"{out}: key {name[:20]}... and {len(read_numbers(pcrs))} PCRs; {goes_to}")
    if root is None:
        typer.echo("UNSAFE: no proof that this key is in a TPM that its host cannot read or reset")
    return Answer({"policy": out, "ak_name": name, "certified": root is not None})


def _certify_key(attester: "TpmAttester", root: Path, chain: Path | None, ek: Path | None) -> str:
    """Have the TPM read a secret that only the one with the vendor's EK and this AK can read."""
    from phalanx.security.crypto import steady_now
    from phalanx.security.tee import begin_enrolment
    from phalanx.security.tee.formats.chain import Trust
    from phalanx.security.tee.formats.x509 import read_certificates

    trust = Trust(read_certificates(read_file(root), str(root)), steady_now())
    certificate = attester.ek_certificate if ek is None else read_file(ek)
    begun = begin_enrolment(certificate, b"" if chain is None else read_file(chain), attester.ak_public, trust)
    return begun.finish_enrolment(attester.activate_credential(begun))


def _policy_text(name: str, evidence: "Evidence", section: str, *, certified: bool) -> str:
    from phalanx.security.tee import inspect_evidence

    vouched = "an endorsement key that its vendor certified" if certified else "NO vendor: it may be software"
    lines = [
        f"# state of the TPM at its enrolment; certified by {vouched}",
        f"[{section}]",
        f'ak_names = ["{name}"]',
    ]
    lines += ["", f"[{section}.measurements]"]
    lines += [f'"{measurement}" = ["{value}"]' for measurement, value in inspect_evidence(evidence).items()]
    return "\n".join(lines) + "\n"
