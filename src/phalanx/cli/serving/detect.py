"""``phalanx detect``: was a text written by a server that marks with these keys?"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer

MARKED, NOT_MARKED, CANNOT_TELL = 0, 5, 7
DETECT_EPILOG = (
    "Example: phalanx detect answer.txt --tokenizer models/mine --keys keys/marks.json\n\n"
    'Example: phalanx detect "The text itself ..." --tokenizer models/mine --keys keys/marks.json --json\n\n'
    f"Exit codes: {MARKED} marked, 2 the command line is wrong, 3 something on disk is wrong, "
    f"{NOT_MARKED} no sign of a mark, {CANNOT_TELL} cannot tell."
)


def detect(
    text: Annotated[str, typer.Argument(metavar="TEXT|FILE|-", help="A file, stdin (-), or the text itself.")],
    tokenizer: Annotated[Path, typer.Option("--tokenizer", metavar="DIR", help="Directory of the model's tokenizer.")],
    keys: Annotated[list[Path], typer.Option("--keys", metavar="FILE", help="Mark keys; may be given several times.")],
    max_p: Annotated[float, typer.Option("--max-p", min=1e-300, max=0.05, help="Largest p-value of a mark.")] = 1e-6,
    min_tokens: Annotated[
        int, typer.Option("--min-tokens", min=1, help="Number of tokens below which no result is given.")
    ] = 16,
) -> Answer:
    """Look for the mark of any of some keys; the p-value is exact and corrected for their number."""
    from phalanx.data.normal_form import check_text
    from phalanx.data.tokenizers.check import open_vocabulary
    from phalanx.serve.marks import MarkKeyRing, detect_mark, set_aside

    content, source = _read(text)
    plain, wrapper = set_aside(content)
    check_text(plain, source)
    tokens = open_vocabulary(tokenizer).backend.encode(plain, add_special_tokens=False).ids
    ring = [key for file in keys for key in MarkKeyRing.read(file).keys]
    verdict = detect_mark(tokens, ring, max_p_value=max_p, min_tokens=min_tokens)
    typer.echo(
        f"{verdict.verdict}: p = {_power(verdict.log10_p_value)} over {verdict.num_tokens} tokens "
        f"({verdict.num_tests} tests)"
    )
    if wrapper is not None:
        typer.echo(f"a C2PA wrapper of {len(wrapper.manifest)} bytes was set aside; its signature was not checked")
    code = {"marked": MARKED, "not marked": NOT_MARKED, "cannot tell": CANNOT_TELL}[verdict.verdict]
    facts = {"source": source, "c2pa_bytes": len(wrapper.manifest) if wrapper else None, **verdict.model_dump()}
    return Answer(facts, exit_code=code)


def _power(log10_p: float) -> str:
    return f"{10**log10_p:.2g}" if log10_p > -300 else f"1e{log10_p:.0f}"


def _read(text: str) -> tuple[str, str]:
    """Return a text and where it is from: ``file``, ``stdin`` or ``argument``."""
    from phalanx.errors import DataError

    try:
        if text == "-":
            return sys.stdin.buffer.read().decode("utf-8"), "stdin"
        if _is_file(text):
            # a byte-order mark stays: a provenance wrapper begins with one
            return Path(text).read_bytes().decode("utf-8"), "file"
    except UnicodeDecodeError as exc:
        raise DataError(f"{text}: byte {exc.start} is in no UTF-8 text; convert it").with_facts(
            code="PHX-I015"
        ) from exc
    return text, "argument"


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        # a text may be longer than a path can be, or hold what no path can
        return False
