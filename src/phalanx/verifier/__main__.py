"""``phalanx-verify``: check what you were handed, offline."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
    reports: list[PathReport] = []
    codes = [_verify_one(path, options, reports) for path in options.paths]
    idle = set[str].intersection(*(report.idle for report in reports)) if len(reports) > 1 else ()
    for name in sorted(idle):
        doubt = f"nothing that you expect ({name}) is compared with any of these"
        _print_lines(options, {"doubts": [doubt]}, [f"missing: {doubt}"])
        codes.append(7)
    return max(codes, key=(0, 7, 3, 5).index)


def _verify_one(path: Path, options: argparse.Namespace, reports: list[PathReport]) -> int:
    try:
        certificate = None if options.certificate is None else options.certificate.read_text(encoding="ascii")
        heads = tuple(path.read_bytes() for path in options.head)
        pins = options.owner, certificate, options.signer, options.model, options.session
        expected = Expectations(*pins, heads, options.absent)
        reports.append(report := verify_path(path, expected, is_alone=len(options.paths) == 1))
        _print_report(path, report, options)
    except (RefusedError, UnreadableError, OSError, ValueError, RecursionError, MemoryError) as exc:
        code = 3 if isinstance(exc, UnreadableError | OSError | MemoryError) else 5
        verdict, reason = "refused" if code == 5 else "unreadable", str(exc) or "it needs more memory than there is"
        facts = {"path": str(path), "verdict": verdict, "reason": reason}
        _print_lines(options, facts, [f"{path}: {verdict}: {reason}"])
        return code
    return 7 if report.doubts else 0


def _print_report(path: Path, report: PathReport, options: argparse.Namespace) -> None:
    verdict = "holds, but something is missing" if report.doubts else "holds"
    facts: dict[str, Any] = {"path": str(path), "kind": report.kind, "verdict": verdict, "remarks": report.remarks}
    rows = {f"{path}": f"{report.kind}: {verdict}", **report.rows}
    rows |= {f"remark {n}": text for n, text in enumerate(report.remarks, 1)}
    rows |= {f"missing {n}": text for n, text in enumerate(report.doubts, 1)}
    facts |= {"doubts": report.doubts, "facts": report.facts}
    _print_lines(options, facts, [f"{name}: {text}" for name, text in rows.items()])


def _print_lines(options: argparse.Namespace, facts: Mapping[str, Any], lines: Sequence[str]) -> None:
    stated = json.dumps(facts, default=str, allow_nan=False)
    for text in [stated] if options.json else lines:
        # whatever others wrote must not move the cursor of a terminal
        sys.stdout.write("".join(character if character.isprintable() else "?" for character in text) + "\n")


def run() -> None:
    """Start the program as its script does."""
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    sys.exit(main())


if __name__ == "__main__":
    run()
