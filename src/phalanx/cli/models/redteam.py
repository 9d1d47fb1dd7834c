"""``phalanx redteam``: attack a model, and explain the findings."""

from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_error, print_line

UNDECIDED = 7
REDTEAM_EPILOG = (
    "Example: phalanx redteam runs/first --out redteam\n\n"
    "Example: phalanx redteam models/mine --members train.jsonl --strangers new.jsonl --fail-above extraction=0.1\n\n"
    "Example: phalanx redteam http://127.0.0.1:8000 --attacks jailbreak,injection --with-garak /opt/garak\n\n"
    "Exit codes: 0 no gate failed, 2 wrong command line, 3 wrong or missing files, 4 a server failed, 5 a score is "
    f"above --fail-above, {UNDECIDED} an attack of a gate was not judged."
)


def redteam(
    where: Annotated[str, typer.Argument(metavar="RUN|DIR|URL", help="A run, a checkpoint, a model, or a server.")],
    *,
    attacks: Annotated[
        str, typer.Option("--attacks", metavar="NAME,...", help="Attacks; default: all but slow ones.")
    ] = "",
    members: Annotated[
        Path | None, typer.Option("--members", metavar="FILE", help='Training texts: JSON lines with "text", or lines.')
    ] = None,
    strangers: Annotated[
        Path | None,
        typer.Option("--strangers", metavar="FILE", help="Texts of the same kind that were not trained on."),
    ] = None,
    reference: Annotated[
        Path | None, typer.Option("--reference", metavar="DIR", help="Model that was not trained on the members.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", help="Harmless prompts of what the model is for.")
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=2, max=100_000, help="Training rows of a run to ask about.")] = 64,
    fail_above: Annotated[
        list[str] | None, typer.Option("--fail-above", metavar="ATTACK=SCORE", help="Fail above this score.")
    ] = None,
    controls: Annotated[
        bool, typer.Option("--controls/--no-controls", help="Run each attack on an undefended model as well.")
    ] = True,
    with_garak: Annotated[
        Path | None, typer.Option("--with-garak", metavar="VENV", help="Run garak from this environment, too.")
    ] = None,
    model: Annotated[str, typer.Option("--model", help="Name of the model at the server.")] = "default",
    key_file: Annotated[
        Path | None, typer.Option("--key-file", metavar="FILE", help="Access key of the server.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Directory of the report.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the draws.")] = 0,
    own_code: Annotated[bool, typer.Option("--own-code", help="Run the code in RUN_DIR/code; read it first.")] = False,
) -> Answer:
    """Attack a trained model: membership, extraction, canaries, inversion, cloning, backdoors, rounding, prompts."""
    from phalanx.errors import ConfigError, VerificationError
    from phalanx.evaluate.evaluation import parse_gates
    from phalanx.redteam.assessment import attack_model, choose_attacks, failed_gates, open_controls
    from phalanx.redteam.garak import GarakRow, run_garak
    from phalanx.redteam.opening import TargetChoice, open_target
    from phalanx.redteam.report import render_findings, write_report

    limits = parse_gates(fail_above or (), "--fail-above", "ATTACK=SCORE, such as extraction=0.1")
    choose_attacks(list(limits))
    names = choose_attacks([name.strip() for name in attacks.split(",") if name.strip()])
    choice = TargetChoice(where, members, strangers, reference, prompts, None, rows, seed, model, key_file, own_code)
    if with_garak is not None and not choice.is_address:
        raise ConfigError("--with-garak: asks a server; start `phalanx serve` and give its address")
    with open_target(choice) as target, open_controls(controls, seed) as undefended:
        probes: list[GarakRow] = []
        if with_garak is not None:
            # it may fail, and no attack is lost to that
            key = key_file.read_text(encoding="utf-8").strip() if key_file else ""
            probes = run_garak(with_garak, where, model, key)
        findings = attack_model(target, names, undefended, lambda name: print_error(f"redteam: {name}"))
        digest = None if target.model is None else target.model.model_digest
    for line in render_findings(findings).splitlines():
        print_line(line)
    for row in probes:
        print_line("  ".join(row.cells))
    counts = {
        kind: sum(finding.outcome == kind for finding in findings) for kind in ("found", "not found", "not judged")
    }
    print_line(", ".join(f"{kind}: {count}" for kind, count in counts.items()))
    facts: dict[str, Any] = {"target": where, "model_digest": digest, "seed": seed}
    facts |= {"counts": counts, "findings": [finding.to_json() for finding in findings]}
    facts |= {"garak": [row.to_json() for row in probes]} if with_garak is not None else {}
    if out is not None:
        facts["report"] = write_report(out, where, facts, findings, probes)
    above, unjudged = failed_gates(findings, limits)
    if above:
        return Answer(facts, error=VerificationError(f"--fail-above: {'; '.join(above)}"))
    if unjudged:
        print_error(f"--fail-above: {'; '.join(unjudged)}")
        return Answer(facts, exit_code=UNDECIDED)
    return Answer(facts)
