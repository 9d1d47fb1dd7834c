"""``phalanx plan``: memory, time and cost of a training under every layout, before anything starts."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.options import Sets, Unsets, overrides_of
from phalanx.errors import ConfigError


def plan(
    run_file: Annotated[Path | None, typer.Argument(metavar="RUN.toml", help="Run file; alternative: --model.")] = None,
    *,
    model: Annotated[
        str | None, typer.Option("--model", metavar="CONFIG.json", help="Hub config, or a known model by name.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", metavar="CLUSTER.toml", help="Cluster file or a known cluster; default: this machine."
        ),
    ] = None,
    gpus: Annotated[
        list[int] | None,
        typer.Option("--gpus", metavar="N", help="Number of its devices; may be repeated; default: all."),
    ] = None,
    sets: Sets = None,
    unsets: Unsets = None,
    tokens: Annotated[
        float | None, typer.Option("--tokens", help="Tokens of the whole training, such as 2e12.")
    ] = None,
    sequences: Annotated[int, typer.Option("--sequences", help="With --model: sequences a step.")] = 512,
    sequence_length: Annotated[int, typer.Option("--sequence-length", help="With --model: tokens a sequence.")] = 2048,
    precision: Annotated[str, typer.Option("--precision", help="With --model: fp32, bf16, fp16 or autocast.")] = "bf16",
    offload: Annotated[str, typer.Option("--offload", help="With --model: none, optimizer or all.")] = "none",
    layout: Annotated[str | None, typer.Option("--layout", metavar="dp=2,tp=2", help="Judge only this layout.")] = None,
    probe: Annotated[
        Path | None,
        typer.Option(
            "--probe", metavar="FILE", help="JSON of phalanx bench collectives with the figures of both links."
        ),
    ] = None,
    split: Annotated[bool, typer.Option("--split", help="Propose the cut of a split, as [split] takes it.")] = False,
    parties: Annotated[
        Path | None,
        typer.Option(
            "--parties",
            metavar="PARTIES.toml",
            help="With --split: the machines that take part; default: this machine.",
        ),
    ] = None,
    cut: Annotated[int | None, typer.Option("--cut", metavar="N", help="With --split: judge only this cut.")] = None,
    leaks: Annotated[
        Path | None,
        typer.Option(
            "--leaks",
            metavar="FILE",
            help="JSON of phalanx reproduce: leaks with --split, stage-leaks for a pipeline; default: measured ones.",
        ),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--measured",
            metavar="RUN_DIR",
            help="Propose new stages of a pipeline that goes on, from its parties' speeds.",
        ),
    ] = None,
    by: Annotated[str, typer.Option("--by", help="Criterion of the ranking: speed or cost.")] = "speed",
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write an HTML page.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="RUN.toml", help="Write the best layout as a run file.")
    ] = None,
) -> Answer:
    """Rank every usable layout of a cluster, give the reasons against the others, and write the best as a run file.

    Nothing is started. Every figure is an estimate; --json and --html name its assumptions.
    """
    from phalanx.cli.planning.answer import planned_cluster, print_plan
    from phalanx.cli.planning.guard import guard_of
    from phalanx.cli.planning.run_file import parties_from_run, print_parties, question_from_run
    from phalanx.cli.planning.split import is_of_split, propose_cut, split_question
    from phalanx.cli.planning.stage_leaks import print_stage_leaks, stage_leaks_of
    from phalanx.planner.search.answer import answer_question
    from phalanx.planner.search.question import about_model
    from phalanx.planner.search.run_file import new_run, write_run

    if run_dir is not None:
        from phalanx.cli.planning.stages import propose_stages

        others = (run_file, model, cluster, gpus, sets, unsets, tokens, layout, probe, parties, cut, leaks, html, out)
        if split or any(option is not None for option in others):
            raise ConfigError(
                "plan: --measured reads all it needs in the run directory; leave out the other options"
            ).with_facts(code="PHX-C002", key="--measured", do="leave out the other options")
        return propose_stages(run_dir)
    overrides = overrides_of(sets, unsets)
    _check_source(run_file, model)
    of_split = {"--parties": parties, "--cut": cut, "--leaks": leaks if run_file is None else None}
    of_layouts = {
        "--cluster": cluster,
        "--gpus": gpus,
        "--layout": layout,
        "--probe": probe,
        "--html": html,
        "--out": out,
    }
    if is_of_split(run_file, overrides, split, of_split, of_layouts):
        asked = split_question(run_file, overrides, model, sequences, sequence_length, precision)
        return propose_cut(asked, parties, cut, leaks)
    planned = planned_cluster(cluster, gpus, probe)
    if run_file is not None:
        question, data = question_from_run(run_file, overrides, planned)
    else:
        question = about_model(model or "", planned, sequences, sequence_length, precision, offload)
        data = new_run(model or "", question.recipe, tokens)
    answer = answer_question(question.with_options(layout=layout, by=by, gpus=gpus or (), tokens=tokens))
    if html is not None:
        from phalanx.report.plan_page import write_plan

        write_plan(html, answer)
    guarded = None if run_file is None else guard_of(run_file, overrides, question.shape)
    shared = None if run_file is None else parties_from_run(run_file, overrides, question)
    seen = None if run_file is None else stage_leaks_of(run_file, overrides, question.shape, leaks)
    facts = answer.as_json() | (guarded.as_json() if guarded else {}) | {"parties": shared and shared.as_json()}
    facts |= seen.as_json() if seen else {}
    try:
        best = answer.require_best()
    except ConfigError as exc:
        return Answer(facts, error=exc)
    if out is not None:
        write_run(out, data, best)
    print_plan(answer, html, out, guarded)
    if shared is not None:
        print_parties(shared)
    print_stage_leaks(seen)
    return Answer(facts)


def _check_source(run_file: Path | None, model: str | None) -> None:
    if (run_file is None) == (model is None):
        raise ConfigError("plan: expected either a run file or --model").with_facts(
            code="PHX-C002",
            key="RUN.toml",
            found="neither" if model is None else "both",
            expected="a run file or --model",
            do="give one of them",
        )
