"""``phalanx-verify``: check what you were handed, offline."""

import argparse
import json
import sys
from pathlib import Path

from .forms import RefusedError, UnreadableError
from .kinds import Expectations, PathReport, verify_path

EXIT_CODES = "exit codes: 0 it holds, 2 wrong command line, 3 unreadable, 5 refused, 7 something is missing"


def main(arguments: list[str] | None = None) -> int:
    """Check the paths of a command line; return the exit code of the worst."""
    parser = argparse.ArgumentParser(
        "phalanx-verify",
        description="Check a passport, a run's log, a dataset, an export, a signed model, evidence or a proof.",
        epilog=f"example: phalanx-verify run.passport --owner FINGERPRINT --model models/first; {EXIT_CODES}",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", type=Path)
    parser.add_argument("--owner", metavar="FINGERPRINT", help="key of the run's owner that you expect")
    parser.add_argument("--certificate", metavar="FILE", type=Path, help="the owner's certificate that you keep")
    parser.add_argument("--signer", metavar="FINGERPRINT", help="key that signs data or exports")
    parser.add_argument("--model", metavar="DIR", type=Path, help="model that came with the passport")
    parser.add_argument("--session", metavar="NAME", help="session of the evidence, from the log")
    parser.add_argument("--head", metavar="FILE", type=Path, action="append", default=[], help="head that others kept")
    parser.add_argument("--absent", metavar="DIGEST", help="document that the model must never have seen")
    parser.add_argument("--json", action="store_true", help="print one JSON object a path")
    options = parser.parse_args(arguments)
    codes = [_verify_one(path, options) for path in options.paths]
    return max(codes, key=(0, 7, 3, 5).index)


def _verify_one(path: Path, options: argparse.Namespace) -> int:
    try:
        certificate = None if options.certificate is None else options.certificate.read_text(encoding="ascii")
        heads = tuple(path.read_bytes() for path in options.head)
        pins = options.owner, certificate, options.signer, options.model, options.session
        expected = Expectations(*pins, heads, options.absent)
        report = verify_path(path, expected)
        _print_report(path, report, is_json=options.json)
    except (RefusedError, UnreadableError, OSError, ValueError, RecursionError, MemoryError) as exc:
        code = 3 if isinstance(exc, UnreadableError | OSError | MemoryError) else 5
        verdict, reason = "refused" if code == 5 else "unreadable", str(exc) or "it needs more memory than there is"
        _print_line(json.dumps({"path": str(path), "verdict": verdict, "reason": reason}), is_wanted=options.json)
        _print_line(f"{path}: {verdict}: {reason}", is_wanted=not options.json)
        return code
    return 7 if report.doubts else 0


def _print_report(path: Path, report: PathReport, *, is_json: bool) -> None:
    verdict = "holds, but something is missing" if report.doubts else "holds"
    facts = {"kind": report.kind, "verdict": verdict, "remarks": report.remarks, "doubts": report.doubts}
    stated = json.dumps({"path": str(path), **facts, "facts": report.facts}, default=str, allow_nan=False)
    _print_line(stated, is_wanted=is_json)
    rows = {**report.rows, **{f"remark {n}": text for n, text in enumerate(report.remarks, 1)}}
    rows |= {f"missing {n}": text for n, text in enumerate(report.doubts, 1)}
    for name, text in {f"{path}": f"{report.kind}: {verdict}", **rows}.items():
        _print_line(f"{name}: {text}", is_wanted=not is_json)


def _print_line(text: str, *, is_wanted: bool) -> None:
    if is_wanted:
        # whatever others wrote must not move the cursor of a terminal
        sys.stdout.write("".join(character if character.isprintable() else "?" for character in text) + "\n")


def run() -> None:
    """Start the program as its script does."""
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    sys.exit(main())


if __name__ == "__main__":
    run()
