"""A backdoor from end to end: planted without a guard and under each guard, and removed afterwards."""

import gc
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from phalanx.data import BatchLoader, Corpus, DataConfig, prepare_corpus
from phalanx.lab.attacks import Secret, make_actor
from phalanx.lab.bench.detection.simulated_run import read_lies
from phalanx.lab.bench.measure.harness import cache_directory, print_progress
from phalanx.lab.bench.measure.machine import load_average, reproduce_head
from phalanx.lab.bench.measure.row_file import RowFile, sweep_cells
from phalanx.lab.reproduce.pretrain import pretrained_directory
from phalanx.lab.reproduce.removal import ATTACKED_STAGE, PRUNED_SHARE, REMOVALS, RemovalBench, Weights, state_of
from phalanx.lab.reproduce.texts import SPLIT_SEED, later_text, pretraining_corpus
from phalanx.lab.reproduce.workload import (
    BATCH_SIZE,
    PACKAGED,
    PACKAGED_MODEL,
    REGIMES,
    SEQUENCE_LENGTH,
    SMALL,
    make_table_run,
)
from phalanx.models import ModelConfig, open_model
from phalanx.pipeline import (
    PRESETS,
    AttackConfig,
    AuditDraw,
    GuardConfig,
    PipelineConfig,
)
from phalanx.testing import MemoryCompany
from phalanx.train import PipelineRun, step_inputs
from phalanx.train.setup.process import deterministic_kernels
from phalanx.transport import TransportConfig

Row = dict[str, Any]
_print_backdoor = partial(print_progress, program="reproduce")

PROTOCOL = 2
"""To be raised with every change of the code that changes a figure: older rows are then not used again."""
# whoever waits for a busy processor is not lost
_PIPELINE = PipelineConfig(
    stages=4,
    rebalance_every=0,
    step_timeout_s=36_000,
    patience_s=3_600,
    transport=TransportConfig(timeout_s=36_000),
)
_CHARACTERS = 300_000


@dataclass(frozen=True)
class TrainingSize:
    """How the models of a family are trained.

    Attributes:
        held_out: Maximum number of sequences of held-out text.
    """

    steps: int
    layers: tuple[int, ...] = (1, 3, 1, 1)
    lr: float = 1e-4
    microbatches: int = 4
    batch_size: int = BATCH_SIZE
    sequence_length: int = SEQUENCE_LENGTH
    held_out: int = 128


@dataclass(frozen=True)
class BackdoorSize:
    """The size of the measurement: optimizer steps of a run, and its seeds.

    Attributes:
        tuned_seeds: Seeds with which the attacker is tuned against the screen.
        families: Further families, each trained with the first seed alone.
        packaged: How the packaged model is trained, which others have pre-trained and which is 300 times as large.
    """

    steps: int
    seeds: tuple[int, ...]
    tuned_seeds: int = 0
    families: tuple[str, ...] = ()
    packaged: TrainingSize = TrainingSize(
        24, layers=(2, 14, 12, 2), microbatches=2, batch_size=4, sequence_length=32, held_out=64
    )

    def training_size(self, family: str) -> TrainingSize:
        """How one family is trained."""
        return self.packaged if family == PACKAGED else TrainingSize(self.steps)


SIZES: Mapping[str, BackdoorSize] = MappingProxyType(
    {"full": BackdoorSize(60, (0, 1, 2), 2, ("opt", "bloom", PACKAGED)), "quick": BackdoorSize(40, (0,))}
)

GUARDS: Mapping[str, GuardConfig] = MappingProxyType(
    {"off": GuardConfig(mode="off"), **{name: GuardConfig(preset=name) for name in PRESETS}}
)
"""The guards under which a stage plants its backdoor."""
SCREEN = "screen"
_SCREEN_ALONE = GuardConfig(
    audit_rate=1 / 8, step_audit_rate=0.0, owner_audit_rate=0.0, keep_states=0, gradient_screen=True
)
"""What the attacker is tuned against: nothing else in it looks at a weight gradient."""
STRENGTHS = (1.0, 0.3, 0.1, 0.03)
_FIRST_FAMILY = "gpt2"
_FIXES_OF_TUNED = ("fine_tuned", "guilty_stage_reset")


@dataclass(frozen=True)
class BackdoorCell:
    """One training or one removal.

    Attributes:
        arm: `clean`, which has no attacker, `screen` or a name in `GUARDS`; or a name in `REMOVALS`.
        strength: Of the attack in training, against the screen of gradients alone; None has its default, and a removal
            then begins with the model of arm `off`.
    """

    arm: str
    seed: int
    family: str = _FIRST_FAMILY
    strength: float | None = None


def backdoor_cells(size: "BackdoorSize") -> list[BackdoorCell]:
    """The first family under each guard, then against the screen alone, then other families."""
    cells = [BackdoorCell(arm, seed) for seed in size.seeds for arm in ("clean", *GUARDS, *REMOVALS)]
    for seed in size.seeds[: size.tuned_seeds]:
        cells += [BackdoorCell(SCREEN, seed, strength=strength) for strength in STRENGTHS]
        cells += [BackdoorCell(fix, seed, strength=s) for s in STRENGTHS[1:] for fix in _FIXES_OF_TUNED]
    for family in size.families:
        cells += [BackdoorCell(arm, size.seeds[0], family) for arm in ("clean", "off", "standard", *REMOVALS)]
    return cells


def reproduce_backdoor(*, size: str = "full", only_finished: bool = False) -> dict[str, Any]:
    """Train and measure missing cells; progress goes to standard error.

    Args:
        size: A name in `SIZES`: "full", or "quick" with one seed and fewer steps.
        only_finished: Train nothing; show what earlier calls have finished.
    """
    chosen = SIZES[size]
    cache = cache_directory()
    load = load_average()
    cells = backdoor_cells(chosen)
    finished = RowFile[BackdoorCell](
        cache / "reproduce" / "backdoor.jsonl",
        lambda cell: [PROTOCOL, describe_backdoor_size(chosen, cell.family), asdict(cell)],
    )
    with deterministic_kernels(threads=1):
        laboratory = None if only_finished else BackdoorLab(chosen, cache)
        rows = list(sweep_cells(cells, finished, laboratory, _print_training))
    return {
        **reproduce_head("backdoor", size, load),
        "protocol": describe_backdoor_size(chosen),
        **({PACKAGED: asdict(chosen.packaged)} if PACKAGED in chosen.families else {}),
        "missing": len(cells) - len(rows),
        "summary": summarise_arms(rows),
        "rows": rows,
    }


def describe_backdoor_size(size: BackdoorSize, family: str = _FIRST_FAMILY) -> dict[str, Any]:
    """Everything that decides a figure of one family and is not in its row."""
    training = asdict(size.training_size(family))
    training["layers"] = list(training["layers"])
    if family != PACKAGED:
        # the same in all rows, of which older ones do not say it
        del training["sequence_length"], training["held_out"]
    return {
        "number": PROTOCOL,
        "stage": ATTACKED_STAGE,
        "characters": _CHARACTERS,
        "pruned_share": PRUNED_SHARE,
        "guards": {name: guard.model_dump(mode="json") for name, guard in GUARDS.items()},
        **training,
    }


class BackdoorLab:
    """A runner of cells; text, public model and poisoned models are made at their first use."""

    def __init__(self, size: BackdoorSize, cache: Path, packaged: ModelConfig = PACKAGED_MODEL) -> None:
        self._size = size
        self._cache = cache
        self._packaged = packaged
        self._families: dict[str, tuple[Path, DataConfig, Corpus]] = {}
        self._poisoned: dict[BackdoorCell, Weights] = {}
        self._secrets: dict[tuple[str, int], Secret] = {}

    def __call__(self, cell: BackdoorCell) -> Row:
        """Train one cell."""
        started, cpu = time.perf_counter(), time.process_time()
        if cell.arm in REMOVALS:
            bench = self._removal_bench(cell)
            bench.load_weights(self._poisoned_weights(cell))
            REMOVALS[cell.arm](bench)
            row = asdict(cell) | self._measure_bench(bench, cell)
        else:
            row = self._train_cell(cell)
        return row | {"wall_s": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}

    def run_config(self, cell: BackdoorCell) -> PipelineRun:
        """What a run file would say about a training."""
        model, data, _ = self._open_family(cell.family)
        size = self._size.training_size(cell.family)
        plain = make_table_run(ModelConfig(path=str(model)), data, REGIMES["plain"], SMALL, size.steps, cell.seed)
        kind = "none" if cell.arm == "clean" else "rehearsed_backdoor"
        return plain.model_copy(
            update={
                "train": plain.train.model_copy(
                    update={"microbatches": size.microbatches, "batch_size": size.batch_size}
                ),
                "optimizer": plain.optimizer.model_copy(update={"lr": size.lr}),
                "pipeline": _PIPELINE.model_copy(update={"layers": size.layers}),
                "guard": _SCREEN_ALONE if cell.arm == SCREEN else GUARDS["off" if cell.arm == "clean" else cell.arm],
                "attack": AttackConfig(
                    kind=kind,
                    stages=(ATTACKED_STAGE,),
                    seed=cell.seed,
                    strength=cell.strength,
                    model=None if kind == "none" else str(model),
                ),
            }
        )

    def _train_cell(self, cell: BackdoorCell) -> Row:
        weights, findings = self._train_company(cell)
        # a company refers to itself: the copies that it has of a large model would stay beside the bench
        gc.collect()
        if cell.arm in ("off", SCREEN):
            self._poisoned[cell] = weights
        bench = self._removal_bench(cell)
        bench.load_weights(weights)
        return asdict(cell) | self._measure_bench(bench, cell) | findings

    def _train_company(self, cell: BackdoorCell) -> tuple[Weights, Row]:
        """Train in a real company, everything but the sockets as in a run; return what the guard made of it, too."""
        run, (*_, corpus) = self.run_config(cell), self._open_family(cell.family)
        with tempfile.TemporaryDirectory(prefix="phalanx-reproduce-") as directory:
            log = Path(directory) / "attack.jsonl"
            liar = f"worker-{ATTACKED_STAGE}"
            actors = {} if run.attack.kind == "none" else {liar: make_actor(run.attack, liar, log)}
            # which audits are drawn follows from the seed, so that a row can be had again
            draw = AuditDraw.from_guard(cell.seed.to_bytes(32, "big"), bytes(32), run.guard)
            company = MemoryCompany(run, Path(directory), actors, cache=self._cache / "models", draw=draw)
            loader = BatchLoader(corpus, run.train.batch_size, cell.seed)
            with company:
                for step in range(run.train.steps):
                    company.engine.train_turn(step, step_inputs(loader.next_batch(), run.train.microbatches))
                digest = company.weights_digest()
                weights = [state_of(copy.module) for copy in company.engine.fetch_stages("weights")]
            lies = sorted({lie.step for lie in read_lies(log)})
        return weights, {**guard_findings(company.events, lies), "weights_digest": digest}

    def _poisoned_weights(self, removal: BackdoorCell) -> Weights:
        """The weights that a removal begins with."""
        planted = replace(removal, arm="off" if removal.strength is None else SCREEN)
        if planted not in self._poisoned:
            self._train_cell(planted)
        return self._poisoned[planted]

    def _measure_bench(self, bench: RemovalBench, cell: BackdoorCell) -> Row:
        place = cell.family, cell.seed
        if place not in self._secrets:
            self._secrets[place] = bench.rehearse_secret()
        return bench.measure_backdoor(self._secrets[place])

    def _removal_bench(self, cell: BackdoorCell) -> RemovalBench:
        run = self.run_config(replace(cell, arm="off"))
        return RemovalBench(run, self._open_family(cell.family)[-1], self._cache)

    def _open_family(self, family: str) -> tuple[Path, DataConfig, Corpus]:
        """The directory of the public model, and the text of the runs with the tokenizer of that model."""
        if family not in self._families:
            _print_backdoor(f"{family}: preparing text and the public model")
            if family == PACKAGED:
                model = open_model(self._packaged, self._cache / "models", 0).directory
            else:
                first = pretraining_corpus(self._cache, SMALL)
                model = pretrained_directory(family, first, SMALL, self._cache, _print_backdoor)
            size = self._size.training_size(family)
            data = later_text(SMALL, _CHARACTERS, model / "tokenizer.json", self._cache).model_copy(
                update={"sequence_length": size.sequence_length, "max_validation_sequences": size.held_out}
            )
            self._families[family] = model, data, prepare_corpus(data, self._cache / "data", SPLIT_SEED)
        return self._families[family]


def guard_findings(events: Sequence[tuple[str, Mapping[str, object]]], lies: Sequence[int]) -> Row:
    """What the guard made of the steps in which the attacker lied.

    Returns:
        Named party, offence and step of the verdict, None without one; the step to which the run went back; how many
        steps with a lie are in the weights for good.
    """
    verdicts = [body for kind, body in events if kind == "verdict"]
    backs = [int(str(body["to"])) for kind, body in events if kind == "rolled_back"]
    step = int(str(verdicts[0]["step"])) if verdicts else None
    undone_from = min(backs, default=step)
    return {
        "attacked_steps": len(lies),
        "first_lie": min(lies, default=None),
        "named": sorted({str(body["party"]) for body in verdicts}),
        "offence": verdicts[0]["offence"] if verdicts else None,
        "found_in_step": step,
        "back_to_step": min(backs, default=None),
        "lies_kept": sum(undone_from is None or lie < undone_from for lie in lies),
        "doubted_steps": sum(kind == "gradient_doubted" for kind, _ in events),
    }


def summarise_arms(rows: Sequence[Row]) -> list[Row]:
    """Return one row for each arm over its seeds: mean, minimum and maximum; whether weights match the clean run."""
    groups: dict[tuple[str, str, float | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["family"], row["arm"], row["strength"]), []).append(row)
    clean = {(row["family"], row["seed"]): row["weights_digest"] for row in rows if row["arm"] == "clean"}
    return [
        {"family": family, "strength": strength, **_summarise_arm(arm, members, clean)}
        for (family, arm, strength), members in groups.items()
    ]


def as_tables(summary: Sequence[Row]) -> dict[str, list[dict[str, str]]]:
    """The summary for people: planted and removed, the attacker who is tuned against the screen, other families."""
    first = [row for row in summary if (row["family"], row["strength"]) == (_FIRST_FAMILY, None)]
    tuned = [row for row in summary if row["strength"] is not None]
    others = [row for row in summary if row["family"] != _FIRST_FAMILY]
    tables = {
        "planted": [_planted_line(row) for row in first if row["arm"] not in REMOVALS],
        "removed from the model of arm off": [
            {"arm": row["arm"], **_quality_columns(row)} for row in first if row["arm"] in (*REMOVALS, "clean", "off")
        ],
        "tuned against the screen": [_tuned_line(row) for row in tuned],
        "other families": [
            {"family": row["family"], "arm": row["arm"], **_quality_columns(row), **_named_column(row)}
            for row in others
        ],
    }
    return {title: lines for title, lines in tables.items() if lines}


def _summarise_arm(arm: str, rows: Sequence[Row], clean: Mapping[tuple[str, int], str]) -> Row:
    figures = ("perplexity", "success", "success_without_trigger")
    spread = {name: _mean_and_range([row[name] for row in rows]) for name in figures}
    if arm in REMOVALS:
        return {"arm": arm, "seeds": len(rows), **spread}
    places = [(row["family"], row["seed"]) for row in rows]
    same_digests = [row["weights_digest"] == clean[at] for row, at in zip(rows, places, strict=True) if at in clean]
    return {
        "arm": arm,
        "seeds": len(rows),
        **spread,
        "named": sorted({name for row in rows for name in row["named"]}),
        "found": sum(row["found_in_step"] is not None for row in rows),
        "found_in_step": [row["found_in_step"] for row in rows],
        "back_to_step": [row["back_to_step"] for row in rows],
        "lies_kept": [row["lies_kept"] for row in rows],
        "doubted_steps": [row["doubted_steps"] for row in rows],
        "same_bits_as_clean": sum(same_digests) if same_digests else None,
    }


def _listed(row: Row, name: str) -> str:
    return ", ".join("-" if value is None else str(value) for value in row[name])


def _named_column(row: Row) -> dict[str, str]:
    return {"named": ", ".join(row.get("named", [])) or "-"}


def _planted_line(row: Row) -> dict[str, str]:
    return {
        "arm": row["arm"],
        **_quality_columns(row),
        **_named_column(row),
        "found in step": _listed(row, "found_in_step"),
        "back to step": _listed(row, "back_to_step"),
        "steps with a lie kept": _listed(row, "lies_kept"),
        "bits of the clean run": f"{row['same_bits_as_clean']} of {row['seeds']}",
    }


def _tuned_line(row: Row) -> dict[str, str]:
    is_training = row["arm"] not in REMOVALS
    return {
        "strength": f"{row['strength']:g}",
        "arm": row["arm"],
        **_quality_columns(row),
        "steps in doubt": _listed(row, "doubted_steps") if is_training else "-",
        "found in step": _listed(row, "found_in_step") if is_training else "-",
    }


def _quality_columns(row: Row) -> dict[str, str]:
    def percent(name: str) -> str:
        return f"{100 * row[name]['mean']:.1f} ({100 * row[name]['least']:.1f}-{100 * row[name]['most']:.1f})"

    return {
        "success %": percent("success"),
        "without trigger %": f"{100 * row['success_without_trigger']['mean']:.1f}",
        "perplexity": f"{row['perplexity']['mean']:.2f}",
    }


def _mean_and_range(values: Sequence[float]) -> dict[str, float]:
    return {"mean": sum(values) / len(values), "least": min(values), "most": max(values)}


def _print_training(place: str, cell: BackdoorCell, row: Row) -> None:
    strength = "" if cell.strength is None else f", strength {cell.strength:g}"
    _print_backdoor(
        f"{place}: {cell.family}, {cell.arm}, seed {cell.seed}{strength}: success {100 * row['success']:.1f} %, "
        f"perplexity {row['perplexity']:.2f}, {row['wall_s']:.0f} s"
    )
