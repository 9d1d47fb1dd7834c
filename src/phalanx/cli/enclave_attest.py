"""``phalanx enclave attest``: have this machine's hardware sign a nonce and a key."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.enclave_pack import read_endorsements
from phalanx.cli.files import read_file, write_file
from phalanx.errors import ConfigError

ATTEST_EXAMPLES = (
    "Example: phalanx enclave attest --nonce 64HEX --key tls.pem --run 64HEX --out evidence.json\n"
    "\nExample: phalanx enclave attest --kind tpm --tpm swtpm:path=/run/tpm/socket --pcrs 0,7 --nonce 64HEX "
    "--key 64HEX --run 64HEX --out evidence.json\n\nExit codes: 0 written, 2 wrong command line, 3 no such "
    "evidence on this machine, 5 refused by its TPM."
)
_DIGEST_DIGITS = 64


def attest(
    *,
    nonce: Annotated[str, typer.Option(metavar="HEX", help="Nonce of the verifier, 32 bytes.")],
    key: Annotated[str, typer.Option(metavar="PEM|HEX", help="TLS key: a certificate, a public key or its digest.")],
    run: Annotated[str, typer.Option(metavar="HEX", help="Digest of the run's config.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Output file: the evidence in its envelope.")],
    role: Annotated[str, typer.Option(help="Role of this machine in the run.")] = "server",
    kind: Annotated[str | None, typer.Option(help="snp, tdx, sgx, nitro, tpm, nv-gpu; default: detected.")] = None,
    add: Annotated[list[str] | None, typer.Option(metavar="NAME=FILE", help="Endorsement; may be repeated.")] = None,
    tpm: Annotated[
        str, typer.Option(metavar="ADDRESS", help="TPM, in the notation of tpm2-tools.")
    ] = "device:/dev/tpmrm0",
    pcrs: Annotated[str, typer.Option(help="PCRs that the TPM quotes.")] = "0,1,2,3,4,5,6,7",
) -> Answer:
    """Write evidence of this machine, bound to a nonce, a key, a run and a role; print what its tier proves."""
    from phalanx.cli.console import print_figures
    from phalanx.security.tee import TIERS, Binding, find_kind, inspect_evidence, open_attester

    try:
        binding = Binding(_parse_digest(nonce, "--nonce"), _key_digest(key), _parse_digest(run, "--run"), role)
    except ValueError as exc:
        raise ConfigError(f"--role: {exc}").with_facts(code="PHX-C002", key="--role") from exc
    chosen = kind or find_kind()
    with open_attester(chosen, read_endorsements(add), tpm=tpm, pcrs=read_numbers(pcrs)) as attester:
        evidence = attester.make_evidence(binding)
    write_file(out, evidence.to_bytes())
    figures = {"tier": TIERS[chosen], "evidence": str(out), "endorsements": ", ".join(evidence.endorsements) or None}
    figures |= inspect_evidence(evidence)
    print_figures(figures)
    return Answer(figures)


def _parse_digest(text: str, option: str) -> bytes:
    if len(text) != _DIGEST_DIGITS or set(text) - set("0123456789abcdef"):
        raise ConfigError(f"{option} {text[:80]}: expected {_DIGEST_DIGITS} lowercase hex digits").with_facts(
            code="PHX-C002", key=option, found=text[:80]
        )
    return bytes.fromhex(text)


def _key_digest(text: str) -> bytes:
    from phalanx.security.tee import read_tls_key_digest

    if len(text) == _DIGEST_DIGITS and not set(text) - set("0123456789abcdef"):
        return bytes.fromhex(text)
    try:
        return read_tls_key_digest(read_file(Path(text)))
    except ValueError as exc:
        raise ConfigError(f"--key {text}: expected a certificate or a public key in PEM").with_facts(
            code="PHX-C002", key="--key"
        ) from exc


def read_numbers(text: str) -> tuple[int, ...]:
    """Read the numbers of PCRs."""
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError as exc:
        raise ConfigError(f"--pcrs {text}: expected numbers such as 0,7").with_facts(
            code="PHX-C002", key="--pcrs", found=text, expected="numbers such as 0,7"
        ) from exc
