"""``phalanx data export`` and ``phalanx data import``: token shards to and from files of other tools."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures
from phalanx.cli.data.options import DatasetDir, KeyFile, Signer, open_given
from phalanx.errors import DataError


def export(
    directory: DatasetDir,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Output directory.")],
    to: Annotated[
        Literal["parquet", "megatron"],
        typer.Option("--to", help="Output format: Parquet, or Megatron's .bin and .idx."),
    ],
    key: KeyFile = None,
    signer: Signer = None,
) -> Answer:
    """Verify a dataset and write each split of each group as GROUP.SPLIT.parquet, or as GROUP.SPLIT.bin and .idx.

    The written files are neither encrypted nor signed.
    """
    from phalanx.data.shards.megatron import write_megatron
    from phalanx.data.shards.parquet import write_parquet

    dataset = open_given(directory, key, signer)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise DataError(f"{out}: cannot be created ({exc.strerror}); give another directory") from exc
    files: list[str] = []
    for part in dataset.manifest.parts:
        stem = f"{part.group}.{part.split}"
        if to == "parquet":
            files.append(str(write_parquet(dataset, part.group, part.split, out / f"{stem}.parquet")))
        else:
            files += [str(path) for path in write_megatron(dataset, part.group, part.split, out / stem)]
    print_figures({"files": "\n".join(files), "trust": dataset.trust_statement})
    return Answer({"files": files, "dataset": dataset.digest, "signer": dataset.signer})


def import_(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="New dataset.")],
    files: Annotated[list[Path], typer.Argument(metavar="FILES", help="GROUP.SPLIT.parquet, or GROUP.SPLIT.idx.")],
    tokenizer: Annotated[
        Path, typer.Option("--tokenizer", metavar="FILE", help="The tokenizer.json that made the tokens.")
    ],
    eos_id: Annotated[int, typer.Option("--eos-id", metavar="ID", min=0, help="Token id that ends a text.")],
    licence: Annotated[str, typer.Option("--licence", help="License of the texts.")] = "",
    signing_key: Annotated[
        Path | None,
        typer.Option("--signing-key", metavar="FILE", help="Signing key; created if missing; default: your own."),
    ] = None,
) -> Answer:
    """Make a signed dataset of the tokens of another tool, unchanged."""
    import hashlib

    from phalanx.cli.files import read_file, write_file
    from phalanx.data.pack import token_dtype
    from phalanx.data.shards import DatasetWriter, TokenizerRecord, default_signing_key, fingerprint_of, load_signer
    from phalanx.data.shards.foreign import ForeignTokens, TokenFile, import_tokens
    from phalanx.data.tokenizers.tokenizer import open_tokenizer

    content, size = read_file(tokenizer), open_tokenizer(tokenizer, eos_id).vocab_size
    digest = hashlib.sha256(content).hexdigest()
    record = TokenizerRecord(kind="file", vocab_size=size, eos_id=eos_id, digest=digest)
    foreign = ForeignTokens([TokenFile.from_path(path) for path in files], record, licence)
    signer = load_signer(signing_key or default_signing_key())
    with DatasetWriter(out, token_dtype(size)) as writer:
        write_file(out / "tokenizer.json", content)
        manifest = import_tokens(foreign, writer, signer)
    figures = {"documents": manifest.documents, "tokens": manifest.tokens, "signed by": fingerprint_of(signer)}
    print_figures({"dataset": out, **figures})
    return Answer({"directory": str(out), **figures})
