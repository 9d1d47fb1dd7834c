"""``phalanx reverify``: recompute a published run as a stranger, and attest to the outcome."""

from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures

if TYPE_CHECKING:
    from phalanx.governance.reverify import Reverification, ReverificationPrice

_UNDECIDED = 7
REVERIFY_EPILOG = (
    "Example: phalanx reverify public/first --share 1/20 --certificate pinned/owner.pem\n\n"
    "Example: phalanx reverify public/first --step 41 --data data/mine\n\n"
    f"Exit codes: 0 proved, 2 wrong command line, 3 missing files, 5 refuted, {_UNDECIDED} could not be decided."
)


def reverify(
    bundle: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of phalanx publish, or the passport in it.")],
    share: Annotated[str, typer.Option(metavar="SHARE", help="Share of all steps, such as 1/20.")] = "1/20",
    *,
    step: Annotated[int | None, typer.Option(min=0, help="This step alone, from the state before it.")] = None,
    seed: Annotated[str | None, typer.Option(metavar="TEXT", help="Repeat this draw; default: a fresh seed.")] = None,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", metavar="FILE", help="Copy of the owner's certificate.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", help="The data set where it is not published.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="The model's first files where not published.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Attestation and progress; default: reverify-DIGEST.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", metavar="FILE", help="Your signing key; default: the one of data sets.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check all files and print what it would cost.")] = False,
) -> Answer:
    """Recompute drawn segments of a published run bit for bit, compare them with its signed log, and attest to it.

    The draw is yours. The first step that differs is named. Other bits refute on a machine of the run's numeric
    class, and anywhere with exact arithmetic. The same command goes on after an interruption.
    """
    wanted = _parse_share(share)
    from phalanx.governance.publication import open_publication
    from phalanx.governance.reverify import (
        ATTESTATION_FILE,
        RequestedPlaces,
        Reverifier,
        choose_seed,
        sign_attestation,
    )

    publication = open_publication(bundle, certificate)
    home = out or Path(f"reverify-{publication.digest[:16]}")
    reverifier = Reverifier(publication, RequestedPlaces(home / "cache", data, model))
    seed = choose_seed(home, publication.digest, seed)
    segments = reverifier.draw_segments(wanted, seed) if step is None else [reverifier.find_segment(step)]
    price = reverifier.estimate_price(segments)
    print_figures(_price_rows(price, seed))
    if dry_run:
        return Answer({"price": price.to_json(), "seed": seed})
    from phalanx.data.shards import default_signing_key, load_signer
    from phalanx.telemetry.progress import row_bar

    signer = load_signer(key or default_signing_key())
    with row_bar("steps") as tell:
        answer = reverifier.recompute_segments(segments, (seed, share if step is None else f"step {step}"), home, tell)
    file = home / ATTESTATION_FILE
    file.write_bytes(sign_attestation(answer, publication, signer))
    print_figures({**_result_rows(answer), "attestation": file, "signed by": signer.public.public_key.hex()})
    return _weigh_answer(answer, {**answer.to_json(), "attestation": file, "publication": publication.digest})


def _weigh_answer(answer: "Reverification", facts: dict[str, Any]) -> Answer:
    from phalanx.errors import VerificationError

    if answer.verdict == "refuted" and answer.first_difference is not None:
        return Answer(facts, error=VerificationError(f"refuted: {answer.first_difference.describe_fact()}"))
    return Answer(facts, exit_code=_UNDECIDED if answer.verdict == "undecided" else 0)


def _parse_share(text: str) -> Fraction:
    try:
        share = Fraction(text)
    except (ValueError, ZeroDivisionError) as exc:
        raise typer.BadParameter(f"--share {text}: expected a fraction such as 1/20") from exc
    if not 0 < share <= 1:
        raise typer.BadParameter(f"--share {text}: expected more than 0 and at most 1")
    return share


def _price_rows(price: "ReverificationPrice", seed: str) -> dict[str, Any]:
    return {
        "seed": seed,
        "segments": ", ".join(f"{part.start} to {part.end}" for part in price.segments) or "none",
        "steps to recompute": f"{price.steps} of {price.num_steps}",
        "tokens": price.tokens,
        "bytes that were read": price.size_bytes,
        "about": None if price.seconds is None else f"{price.seconds} s, as the run took for as many steps",
    }


def _result_rows(answer: "Reverification") -> dict[str, Any]:
    difference = answer.first_difference
    rows: dict[str, Any] = {
        "verdict": answer.verdict,
        "equal bits": f"{answer.recomputed} of {answer.num_steps} steps",
        "order of the data": f"drawn again for {answer.ordered} steps",
        "first difference": None if difference is None else difference.describe_fact(),
        "cost": f"{answer.cost['cpu_seconds']} s of CPU, {answer.cost['seconds']} s",
    }
    rows |= {f"  undecided {n}": reason for n, reason in enumerate(answer.reasons, 1)}
    return rows | {f"  remark {n}": remark for n, remark in enumerate(answer.remarks, 1)}
