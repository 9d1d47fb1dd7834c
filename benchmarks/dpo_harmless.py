"""What does preference tuning learn: of people's judgements of harmlessness, or of made pairs?

``python benchmarks/dpo_harmless.py RUN_DIR OUT.json`` reads a finished run of ``examples/dpo_harmless.toml``, with
``--example dpo`` one of ``examples/dpo.toml``, where a liar is evicted on the way.
"""

from pathlib import Path

from finished_run import FinishedRun, arguments_of, write_result

from phalanx.align.safety import rate


def main() -> None:
    """Write one JSON object."""
    parser = arguments_of(__doc__)
    parser.add_argument("--example", choices=("dpo", "dpo_harmless"), default="dpo_harmless")
    arguments = parser.parse_args()
    example = arguments.example
    run = FinishedRun(Path(f"examples/{example}.toml"), arguments.run_dir)
    held_out = [
        {name: line[f"validation_{name}"] for name in ("accuracy", "margin", "kl", "loss")} | {"step": line["step"] + 1}
        for line in run.lines
        if "validation_accuracy" in line
    ]
    said = "" if example == "dpo_harmless" else f" --example {example}"
    command = f"python benchmarks/dpo_harmless.py runs/{example} OUT.json{said}"
    result = run.facts(example.replace("_", "-"), command) | {"held_out": held_out, "loss": run.losses()}
    if example == "dpo_harmless":
        pairs = run.config.data.max_validation_sequences
        result |= {"pairs_held_out": pairs, "interval": rate(round(held_out[-1]["accuracy"] * pairs), pairs)}
    else:
        result |= {name: run.summary[name] for name in ("attacks_injected", "detections", "evicted")}
    write_result(arguments.out, result)


if __name__ == "__main__":
    main()
