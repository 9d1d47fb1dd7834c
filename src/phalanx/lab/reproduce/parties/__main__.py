"""The paper's transports beside each other: bytes, CPU time and memory of real parties.

``python -m phalanx.lab.reproduce.parties OUT.json --run-file RUN.toml [--steps 20] [--compare 1]``

RUN.toml is a run file of the laboratory: its line ``paper.defence`` says which transport is played. With ``--compare``
every defence is played, honest and against each lie, on the same batches.
"""

from pathlib import Path
from typing import Any, get_args

from phalanx.data import BatchLoader
from phalanx.errors import ConfigError, TrainingError
from phalanx.lab.bench.measure.harness import cache_directory, print_progress, run_program, scratch_directory
from phalanx.lab.bench.measure.workloads import prepare_run
from phalanx.lab.reproduce.parties.initiator import PartyProcesses, RealParties
from phalanx.lab.reproduce.parties.party import SERVER
from phalanx.lab.reproduce.parties.settings import DEFENCES, Lie, PaperRun, load_paper_run
from phalanx.train import step_inputs


def measure_transports(run_file: Path, steps: int = 20, compare: int = 0) -> dict[str, Any]:
    """Play the defence of the run file, or all of them.

    Returns:
        A row for each defence and lie: alarms, honest stages accused, attacked steps without an alarm, bytes sent in
        all and by the server, CPU seconds by kind of party, memory of duplicates, the digest of the weights, and the
        step in which the defence gave up; None where it did not.
    """
    own = load_paper_run(run_file)
    if own.run.pipeline.stages <= len((SERVER, "two ends")):
        raise ConfigError(f"pipeline.stages = {own.run.pipeline.stages}: a middle stage is needed; set it to 3 or more")
    played = [(own.paper.defence, own.paper.lie)]
    if compare:
        played = [(defence, lie) for lie in get_args(Lie) for defence in DEFENCES]
    cache = cache_directory().resolve()
    rows = []
    with scratch_directory() as home, PartyProcesses(own.run.pipeline.stages, home / "parties.log") as processes:
        for defence, lie in played:
            run = own.model_copy(update={"paper": own.paper.model_copy(update={"defence": defence, "lie": lie})})
            rows.append(_play(run, processes, cache, steps))
            print_progress(f"{defence}, {lie}: {len(rows)} of {len(played)}", "parties")
    return {"steps": steps, "stages": own.run.pipeline.stages, "rows": rows}


def _play(paper_run: PaperRun, processes: PartyProcesses, cache: Path, steps: int) -> dict[str, Any]:
    run = paper_run.run
    _, corpus = prepare_run(run, cache)
    loader = BatchLoader(corpus, run.train.batch_size, run.train.seed)
    parties = RealParties(processes, paper_run, cache / "models")
    loss: float | None = None
    ended: int | None = None
    for step in range(steps):
        try:
            loss = parties.train_step(step, step_inputs(loader.next_batch(), run.train.microbatches))
        except TrainingError:
            # two alarms in one step, to which skip layer has no answer
            ended = step
            break
    usage, counts = parties.measure_usage(), parties.counts
    sent = {name: sum(party["sent_bytes"].values()) for name, party in usage.items()}
    return {
        "defence": paper_run.paper.defence,
        "lie": paper_run.paper.lie,
        "rate": paper_run.paper.rate if paper_run.paper.lie != "none" else None,
        "attacked_steps": counts.attacked_steps,
        "alarms": len(counts.alarms),
        "honest_accused": counts.honest_accused,
        "missed_steps": counts.missed_steps,
        "redone_passes": counts.redone_passes,
        "sent_bytes": sum(sent.values()),
        "server_sent_bytes": sent.get(SERVER),
        "stages_cpu_s": sum(party["cpu_s"] for name, party in usage.items() if name != SERVER),
        "server_cpu_s": usage[SERVER]["cpu_s"] if SERVER in usage else None,
        "duplicate_bytes": sum(party["duplicate_bytes"] for party in usage.values()),
        "ended_in_step": ended,
        "loss_last": loss,
        "weights_digest": parties.weights_digest() if ended is None else None,
    }


if __name__ == "__main__":
    run_program("paper-transports", measure_transports)
