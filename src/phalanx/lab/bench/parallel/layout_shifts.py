"""Some shifts of ``phalanx bench parallel`` alone, beside the plain process.

``python -m phalanx.lab.bench.parallel.layout_shifts OUT.json --shifts "parameters shared" offloaded [--steps 20]``
"""

from typing import Any

from phalanx.errors import ConfigError
from phalanx.lab.bench.measure.harness import cache_directory, run_program, scratch_directory
from phalanx.lab.bench.measure.machine import code_version
from phalanx.lab.bench.parallel.layouts import SHIFTS, small_run
from phalanx.lab.bench.parallel.parallel import measure_parallel, open_layout_rows

_OF_THE_PROGRAM = ("name", "command", "machine", "quick")


def measure_shifts(shifts: list[str], steps: int = 20) -> dict[str, Any]:
    """Measure shifts by name, after the one that has the plain process; see `bench_parallel` for the figures."""
    by_name = {shift.name: shift for shift in SHIFTS}
    unknown = set(shifts) - set(by_name)
    if unknown:
        raise ConfigError(f"--shifts {' '.join(sorted(unknown))}: choices: {', '.join(by_name)}")
    chosen = [SHIFTS[0], *(by_name[name] for name in shifts if name != SHIFTS[0].name)]
    run = small_run()
    run = run.model_copy(update={"train": run.train.model_copy(update={"steps": steps})})
    with scratch_directory() as directory:
        finished = open_layout_rows(directory / "rows.jsonl", run, code_version())
        result = measure_parallel(chosen, run, finished, cache_directory(), quick=False)
    return {key: value for key, value in result.items() if key not in _OF_THE_PROGRAM}


if __name__ == "__main__":
    run_program("layout-shifts", measure_shifts)
