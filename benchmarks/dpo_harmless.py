"""What does preference tuning on people's judgements of harmlessness learn?

``python benchmarks/dpo_harmless.py RUN_DIR OUT.json`` reads a finished run of ``examples/dpo_harmless.toml``.
"""

from pathlib import Path

from finished_run import FinishedRun, arguments_of, write_result

from phalanx.align.safety import rate


def main() -> None:
    """Write one JSON object."""
    arguments = arguments_of(__doc__).parse_args()
    run = FinishedRun(Path("examples/dpo_harmless.toml"), arguments.run_dir)
    pairs = run.config.data.max_validation_sequences
    held_out = [
        {name: line[f"validation_{name}"] for name in ("accuracy", "margin", "kl", "loss")} | {"step": line["step"] + 1}
        for line in run.lines
        if "validation_accuracy" in line
    ]
    result = run.facts("dpo-harmless", "python benchmarks/dpo_harmless.py runs/dpo_harmless OUT.json") | {
        "pairs_held_out": pairs,
        "held_out": held_out,
        "loss": run.losses(),
        "interval": rate(round(held_out[-1]["accuracy"] * pairs), pairs),
    }
    write_result(arguments.out, result)


if __name__ == "__main__":
    main()
