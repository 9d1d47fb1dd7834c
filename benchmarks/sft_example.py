"""What does the example of supervised fine-tuning learn?

``python benchmarks/sft_example.py RUN_DIR OUT.json`` reads a finished run of ``examples/sft.toml``.
"""

from pathlib import Path

from finished_run import FinishedRun, arguments_of, write_result


def main() -> None:
    """Write one JSON object."""
    arguments = arguments_of(__doc__).parse_args()
    run = FinishedRun(Path("examples/sft.toml"), arguments.run_dir)
    result = run.facts("sft-example", "python benchmarks/sft_example.py runs/sft OUT.json") | {
        "audits": run.summary["audits"],
        "held_out_perplexity": run.perplexities(),
        "loss": run.losses(),
    }
    write_result(arguments.out, result)


if __name__ == "__main__":
    main()
