"""``phalanx enclave pack``: a vendor's files into one envelope."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.files import read_file, write_file
from phalanx.errors import ConfigError, InputError


class Encoding(StrEnum):
    """The encoding in which a vendor's tool wrote its evidence."""

    RAW = "raw"
    HEX = "hex"


def pack(
    report: Annotated[Path, typer.Argument(metavar="REPORT", help="Report, as the vendor's tool wrote it.")],
    kind: Annotated[str, typer.Option(help="snp, tdx, sgx, nitro, tpm, nv-gpu, az-snp-vtpm.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Output file: the evidence in its envelope.")],
    add: Annotated[list[str] | None, typer.Option(metavar="NAME=FILE", help="Endorsement; may be repeated.")] = None,
    encoding: Annotated[Encoding, typer.Option(help="Encoding of REPORT.")] = Encoding.RAW,
) -> Answer:
    """Pack evidence and its certificates into one envelope."""
    from phalanx.security.tee import BACKENDS, Evidence

    if kind not in BACKENDS:
        raise ConfigError(f"--kind {kind}: unknown; choices: {', '.join(BACKENDS)}").with_facts(
            code="PHX-C002", key="--kind", found=kind
        )
    data = read_file(report)
    if encoding is Encoding.HEX:
        try:
            data = bytes.fromhex(data.decode("ascii"))
        except ValueError as exc:
            raise InputError(f"{report}: is not hex; remove --encoding for a binary file") from exc
    envelope = Evidence(kind, data, read_endorsements(add))
    write_file(out, envelope.to_bytes())
    typer.echo(f"{out}: {kind} evidence of {len(data)} bytes, {len(envelope.endorsements)} endorsements")
    return Answer({"evidence": out, "kind": kind, "size_bytes": len(data), "endorsements": list(envelope.endorsements)})


def read_endorsements(add: list[str] | None) -> dict[str, bytes]:
    """Read the files of ``--add NAME=FILE``."""
    pairs = [pair.partition("=") for pair in add or []]
    if any(not name or not path for name, _, path in pairs):
        raise ConfigError("--add: expected NAME=FILE, for example chain=chain.pem").with_facts(
            code="PHX-C002", key="--add", expected="NAME=FILE"
        )
    return {name: read_file(Path(path)) for name, _, path in pairs}
