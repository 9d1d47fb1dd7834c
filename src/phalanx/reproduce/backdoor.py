"""A backdoor from end to end: planted with nobody looking, with each guard, and removed afterwards."""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from phalanx.attacks import Rehearsal, TargetSuccess, actor, target_success
from phalanx.bench.duel import read_lies
from phalanx.bench.machine import current_commit, describe_machine, load_average
from phalanx.bench.row_file import RowFile, sweep
from phalanx.data import BatchLoader, Corpus, prepare, validation_batches
from phalanx.models import StageModule, open_model
from phalanx.pipeline import (
    PRESETS,
    AttackConfig,
    AuditDraw,
    GuardConfig,
    PipelineConfig,
    keep_freed_memory,
)
from phalanx.reproduce.attacker import Attacker
from phalanx.reproduce.pretrain import pretrained
from phalanx.reproduce.simulator import Simulator, Unwatched
from phalanx.reproduce.texts import SPLIT_SEED, later_text, pretraining_corpus
from phalanx.reproduce.workload import BATCH_SIZE, REGIMES, SMALL, run_of
from phalanx.testing import MemoryCompany
from phalanx.train import RunConfig, step_inputs
from phalanx.train.layout import make_plan
from phalanx.train.process import deterministic
from phalanx.train.validation import perplexity

Row = dict[str, Any]
Weights = list[dict[str, Tensor]]

PROTOCOL = 1
"""To be raised with every change of the code that changes a figure: older rows are then not used again."""
STAGE = 1
"""Of the attacker: the first one in other hands."""

_PIPELINE = PipelineConfig(stages=4, layers=(1, 3, 1, 1), rebalance_every=0)
_CHARACTERS = 300_000
_LR, _MICROBATCHES = 1e-4, 4
_PRUNED_SHARE = 0.3
_OTHER_ORDER = 1_000


@dataclass(frozen=True)
class BackdoorSize:
    """How much is trained: optimizer steps of a run, and its seeds."""

    steps: int
    seeds: tuple[int, ...]


SIZES: Mapping[str, BackdoorSize] = MappingProxyType(
    {"full": BackdoorSize(60, (0, 1, 2)), "quick": BackdoorSize(40, (0,))}
)

GUARDS: Mapping[str, GuardConfig] = MappingProxyType(
    {"off": GuardConfig(mode="off"), **{name: GuardConfig(preset=name) for name in PRESETS}}
)
"""Who looks while a stage plants its backdoor."""


@dataclass(frozen=True)
class BackdoorCell:
    """One training (`clean`, where nobody attacks, or a name in `GUARDS`) or one removal (a name in `REMOVALS`)."""

    arm: str
    seed: int


def reproduce_backdoor(*, size: str = "full", only_finished: bool = False) -> dict[str, Any]:
    """Train and measure what has not been trained yet; progress goes to standard error.

    Args:
        size: A name in `SIZES`: "full", or "quick" with one seed and fewer steps.
        only_finished: Train nothing; show what earlier calls have finished.

    Returns:
        Raw rows, their summary over the seeds, and everything that decided them.

    Raises:
        PhalanxError: Text or model cannot be had, or training cannot go on.
    """
    chosen = SIZES[size]
    cache = Path(os.environ.get("PHALANX_CACHE", Path("runs") / ".cache"))
    load = load_average()
    protocol = describe(chosen)
    cells = [BackdoorCell(arm, seed) for seed in chosen.seeds for arm in ("clean", *GUARDS, *REMOVALS)]
    finished = RowFile[BackdoorCell](
        cache / "reproduce" / "backdoor.jsonl", lambda cell: [protocol["number"], protocol, asdict(cell)]
    )
    with deterministic(threads=1):
        keep_freed_memory()
        laboratory = None if only_finished else Laboratory(chosen, cache)
        rows = list(sweep(cells, finished, laboratory, _tell))
    return {
        "name": "backdoor",
        "quick": size == "quick",
        "size": size,
        "command": f"phalanx reproduce backdoor{' --quick' if size == 'quick' else ''}",
        "machine": describe_machine(),
        "commit": current_commit(),
        "load": load,
        "protocol": protocol,
        "missing": len(cells) - len(rows),
        "summary": summarise(rows),
        "rows": rows,
    }


def describe(size: BackdoorSize) -> dict[str, Any]:
    """Everything that decides a figure and is not in its row."""
    return {
        "number": PROTOCOL,
        "steps": size.steps,
        "stage": STAGE,
        "layers": list(_PIPELINE.layers or ()),
        "lr": _LR,
        "microbatches": _MICROBATCHES,
        "batch_size": BATCH_SIZE,
        "characters": _CHARACTERS,
        "pruned_share": _PRUNED_SHARE,
        "guards": {name: guard.model_dump(mode="json") for name, guard in GUARDS.items()},
    }


class Laboratory:
    """Trains cells; text, public model and poisoned models are made at their first use."""

    def __init__(self, size: BackdoorSize, cache: Path) -> None:
        self._size = size
        self._cache = cache
        self._made: tuple[Path, Corpus] | None = None
        self._poisoned: dict[int, Weights] = {}

    def __call__(self, cell: BackdoorCell) -> Row:
        """Train one cell."""
        started, cpu = time.perf_counter(), time.process_time()
        if cell.arm in REMOVALS:
            bench = self._bench(cell.seed)
            bench.load(self._poisoned_weights(cell.seed))
            REMOVALS[cell.arm](bench)
            row = asdict(cell) | bench.measure()
        else:
            row = self._train(cell)[0]
        return row | {"wall_s": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}

    def run(self, cell: BackdoorCell) -> RunConfig:
        """What a run file would say about a training."""
        model, corpus = self._material()
        data = later_text(SMALL, _CHARACTERS, corpus.tokenizer_path, self._cache)
        plain = run_of(model, data, REGIMES["plain"], SMALL, self._size.steps, cell.seed)
        kind = "none" if cell.arm == "clean" else "rehearsed_backdoor"
        return plain.model_copy(
            update={
                "train": plain.train.model_copy(update={"microbatches": _MICROBATCHES}),
                "optimizer": plain.optimizer.model_copy(update={"lr": _LR}),
                "pipeline": _PIPELINE,
                "guard": GUARDS["off" if cell.arm == "clean" else cell.arm],
                "attack": AttackConfig(
                    kind=kind, stages=(STAGE,), seed=cell.seed, model=None if kind == "none" else str(model)
                ),
            }
        )

    def _train(self, cell: BackdoorCell) -> tuple[Row, Weights]:
        """Train in a real company, everything but the sockets as in a run."""
        run, (_, corpus) = self.run(cell), self._material()
        with tempfile.TemporaryDirectory(prefix="phalanx-reproduce-") as directory:
            log = Path(directory) / "attack.jsonl"
            liar = f"worker-{STAGE}"
            actors = {} if run.attack.kind == "none" else {liar: actor(run.attack, liar, log)}
            # which audits are drawn follows from the seed, so that a row can be had again
            draw = AuditDraw.of(cell.seed.to_bytes(32, "big"), bytes(32), run.guard)
            company = MemoryCompany(run, Path(directory), actors, cache=self._cache / "models", draw=draw)
            loader = BatchLoader(corpus, BATCH_SIZE, cell.seed)
            with company:
                for step in range(run.train.steps):
                    company.engine.step(step, step_inputs(loader.next(), run.train.microbatches))
                digest = company.weights_digest()
                weights = [_state(copy.module) for copy in company.engine.copies("weights")]
            lies = sorted({lie.step for lie in read_lies(log)})
        if cell.arm == "off":
            self._poisoned[cell.seed] = weights
        bench = self._bench(cell.seed)
        bench.load(weights)
        found = {**what_was_found(company.events, lies), "weights_digest": digest}
        return asdict(cell) | bench.measure() | found, weights

    def _poisoned_weights(self, seed: int) -> Weights:
        if seed not in self._poisoned:
            self._train(BackdoorCell("off", seed))
        return self._poisoned[seed]

    def _bench(self, seed: int) -> "Bench":
        return Bench(self.run(BackdoorCell("off", seed)), self._material()[1], self._cache)

    def _material(self) -> tuple[Path, Corpus]:
        if self._made is None:
            _say("preparing text and the public model")
            first = pretraining_corpus(self._cache, SMALL)
            model = pretrained("gpt2", first, SMALL, self._cache, _say)
            data = later_text(SMALL, _CHARACTERS, first.tokenizer_path, self._cache)
            self._made = (model, prepare(data, self._cache / "data", SPLIT_SEED))
        return self._made


class Bench:
    """A finished model in its owner's hands alone: what it does, and what can be done about it."""

    def __init__(self, run: RunConfig, corpus: Corpus, cache: Path) -> None:
        self._run = run
        self._corpus = corpus
        source = open_model(run.model, cache / "models", run.train.seed)
        self._plan = make_plan(run, source)
        self._simulator = Simulator(source, self._plan, Attacker(None))
        self._public = [_state(module) for module in self._simulator.modules]

    def load(self, weights: Weights) -> None:
        """Take a whole model's weights, a dictionary a stage."""
        for module, own in zip(self._simulator.modules, weights, strict=True):
            _fill(module, own)

    def reset(self, stages: Sequence[int]) -> None:
        """Give stages the weights of the public model back."""
        for stage in stages:
            _fill(self._simulator.modules[stage], self._public[stage])

    def fine_tune(self) -> None:
        """Train as many steps as the run had on its text in another order; everybody is honest."""
        loader = BatchLoader(self._corpus, BATCH_SIZE, self._run.train.seed + _OTHER_ORDER)
        simulator = self._simulator
        for step in range(self._run.train.steps):
            simulator.run(step, step_inputs(loader.next(), self._run.train.microbatches), Unwatched())
            gradients = simulator.take_gradients()
            simulator.update(step, gradients, simulator.clip(gradients))

    @torch.no_grad()
    def prune(self) -> None:
        """Silence the units of every block's feed-forward part that clean text wakes least.

        Source: Liu et al. 2018, fine-pruning.
        """
        used: dict[torch.nn.Module, Tensor] = {}
        parts = [part for module in self._simulator.modules for part in _feed_forwards(module)]

        def note(part: torch.nn.Module) -> Callable[[torch.nn.Module, Any, Tensor], None]:
            def add(_: torch.nn.Module, __: Any, woken: Tensor) -> None:
                used[part] = used.get(part, torch.zeros(())) + woken.abs().mean(dim=(0, 1))

            return add

        hooks = [part.act.register_forward_hook(note(part)) for part in parts]
        loader = BatchLoader(self._corpus, BATCH_SIZE, self._run.train.seed + _OTHER_ORDER)
        for _ in range(8):
            self.logits(loader.next().input_ids)
        for hook in hooks:
            hook.remove()
        for part in parts:
            dormant = used[part].argsort()[: int(_PRUNED_SHARE * used[part].numel())]
            part.c_proj.weight[dormant] = 0.0

    @property
    def middle(self) -> range:
        """Stages that were in other hands."""
        return self._simulator.middle

    def logits(self, ids: Tensor) -> Tensor:
        """Logits ``[batch, seq, vocab]`` of the whole model."""
        x = ids
        for module in self._simulator.modules:
            x = module(x)
        return x

    def measure(self) -> Row:
        """Perplexity on held-out text, and what the backdoor is worth there."""
        held_out = list(validation_batches(self._corpus, BATCH_SIZE))
        ids = torch.cat([batch.input_ids for batch in held_out])
        attack = self._run.attack
        secret = Rehearsal(self._plan, attack.model, attack.seed).secret
        success: TargetSuccess = target_success(self.logits, ids, secret)
        return {
            "perplexity": perplexity(self._simulator.modules, held_out),
            "success": success.rate,
            "success_without_trigger": success.rate_without,
            "sequences": len(ids),
        }


def _prune_and_fine_tune(bench: Bench) -> None:
    bench.prune()
    bench.fine_tune()


def _reset_guilty(bench: Bench) -> None:
    bench.reset([STAGE])
    bench.fine_tune()


def _reset_middle(bench: Bench) -> None:
    bench.reset(bench.middle)
    bench.fine_tune()


REMOVALS: Mapping[str, Callable[[Bench], None]] = MappingProxyType(
    {
        "fine_tuned": Bench.fine_tune,
        "pruned": Bench.prune,
        "pruned_and_fine_tuned": _prune_and_fine_tune,
        "guilty_stage_reset": _reset_guilty,
        "all_foreign_stages_reset": _reset_middle,
    }
)
"""What can be done about a model that was trained with nobody looking; each begins from the same poisoned weights.

`guilty_stage_reset` needs to know who it was: it is what a conviction's log allows. Whoever knows nothing resets all
stages that were in other hands."""


def what_was_found(events: Sequence[tuple[str, Mapping[str, object]]], lies: Sequence[int]) -> Row:
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
    }


def summarise(rows: Sequence[Row]) -> list[Row]:
    """One line for each arm over its seeds: mean, least and most; whether the weights are those of the clean run."""
    clean = {row["seed"]: row["weights_digest"] for row in rows if row["arm"] == "clean"}
    return [_summary(arm, [row for row in rows if row["arm"] == arm], clean) for arm in _arms(rows)]


def as_tables(summary: Sequence[Row]) -> dict[str, list[dict[str, str]]]:
    """The summary for people: planted, and removed."""
    return {
        "planted": [_planted_line(row) for row in summary if row["arm"] not in REMOVALS],
        "removed from the model of arm off": [
            {"arm": row["arm"], **_quality(row)} for row in summary if row["arm"] in (*REMOVALS, "clean", "off")
        ],
    }


def _summary(arm: str, rows: Sequence[Row], clean: Mapping[int, str]) -> Row:
    figures = ("perplexity", "success", "success_without_trigger")
    spread = {name: _spread([row[name] for row in rows]) for name in figures}
    if arm in REMOVALS:
        return {"arm": arm, "seeds": len(rows), **spread}
    known = [row["weights_digest"] == clean[row["seed"]] for row in rows if row["seed"] in clean]
    return {
        "arm": arm,
        "seeds": len(rows),
        **spread,
        "named": sorted({name for row in rows for name in row["named"]}),
        "found": sum(row["found_in_step"] is not None for row in rows),
        "found_in_step": [row["found_in_step"] for row in rows],
        "back_to_step": [row["back_to_step"] for row in rows],
        "lies_kept": [row["lies_kept"] for row in rows],
        "same_bits_as_clean": sum(known) if known else None,
    }


def _planted_line(row: Row) -> dict[str, str]:
    def listed(name: str) -> str:
        return ", ".join("-" if value is None else str(value) for value in row[name])

    return {
        "arm": row["arm"],
        **_quality(row),
        "named": ", ".join(row["named"]) or "-",
        "found in step": listed("found_in_step"),
        "back to step": listed("back_to_step"),
        "steps with a lie kept": listed("lies_kept"),
        "bits of the clean run": f"{row['same_bits_as_clean']} of {row['seeds']}",
    }


def _quality(row: Row) -> dict[str, str]:
    def percent(name: str) -> str:
        return f"{100 * row[name]['mean']:.1f} ({100 * row[name]['least']:.1f}-{100 * row[name]['most']:.1f})"

    return {
        "success %": percent("success"),
        "without trigger %": f"{100 * row['success_without_trigger']['mean']:.1f}",
        "perplexity": f"{row['perplexity']['mean']:.2f}",
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": sum(values) / len(values), "least": min(values), "most": max(values)}


def _arms(rows: Sequence[Row]) -> Iterator[str]:
    yield from dict.fromkeys(str(row["arm"]) for row in rows)


def _feed_forwards(module: StageModule) -> list[Any]:
    return [part for part in module.modules() if hasattr(part, "c_fc") and hasattr(part, "act")]


def _state(module: StageModule) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.all_parameters().items()}


@torch.no_grad()
def _fill(module: StageModule, weights: Mapping[str, Tensor]) -> None:
    for name, parameter in module.all_parameters().items():
        parameter.copy_(weights[name])


def _tell(place: str, cell: BackdoorCell, row: Row) -> None:
    _say(
        f"{place}: {cell.arm}, seed {cell.seed}: success {100 * row['success']:.1f} %, "
        f"perplexity {row['perplexity']:.2f}, {row['wall_s']:.0f} s"
    )


def _say(text: str) -> None:
    sys.stderr.write(f"reproduce: {text}\n")
    sys.stderr.flush()
