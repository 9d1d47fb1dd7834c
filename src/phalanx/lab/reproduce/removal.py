"""A finished model in its owner's hands alone: whether it has a backdoor, and five ways to remove one."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from phalanx.data import BatchLoader, Corpus, validation_batches
from phalanx.lab.attacks import Rehearsal, Secret, target_success
from phalanx.lab.reproduce.attacker import Attacker
from phalanx.lab.reproduce.simulator import NoMessageCheck, Simulator
from phalanx.models import StageModule, open_model
from phalanx.train import PipelineRun, step_inputs
from phalanx.train.batches.validation import measure_perplexity
from phalanx.train.setup.layout import make_plan

Weights = list[dict[str, Tensor]]
"""Of a whole model, a dictionary a stage."""

ATTACKED_STAGE = 1
"""The first stage that another party holds."""
PRUNED_SHARE = 0.3
_OTHER_ORDER = 1_000


class RemovalBench:
    """A test bench for a finished model: it measures the backdoor and applies ways to remove it."""

    def __init__(self, run: PipelineRun, corpus: Corpus, cache: Path) -> None:
        self._run = run
        self._corpus = corpus
        source = open_model(run.model, cache / "models", run.train.seed)
        self._plan = make_plan(run, source)
        self._simulator = Simulator(source, self._plan, Attacker(None))
        self._public = [state_of(module) for module in self._simulator.stage_modules]

    def load_weights(self, weights: Weights) -> None:
        """Take a whole model's weights, a dictionary a stage."""
        for module, stage_weights in zip(self._simulator.stage_modules, weights, strict=True):
            fill_stage(module, stage_weights)

    def reset_stages(self, stages: Sequence[int]) -> None:
        """Give stages the weights of the public model back."""
        for stage in stages:
            fill_stage(self._simulator.stage_modules[stage], self._public[stage])

    def fine_tune(self) -> None:
        """Train as many steps as the run had on its text in another order, with honest stages."""
        loader = BatchLoader(self._corpus, self._run.train.batch_size, self._run.train.seed + _OTHER_ORDER)
        simulator = self._simulator
        for step in range(self._run.train.steps):
            simulator.run_attempt(
                step, step_inputs(loader.next_batch(), self._run.train.microbatches), NoMessageCheck()
            )
            gradients = simulator.take_gradients()
            simulator.update_copies(step, gradients, simulator.combined_clip(gradients))

    @torch.no_grad()
    def prune_units(self) -> None:
        """Silence the units of every block's feed-forward part that clean text wakes least.

        Source: Liu et al. 2018, fine-pruning.
        """
        used: dict[torch.nn.Module, Tensor] = {}
        parts = [part for module in self._simulator.stage_modules for part in _down_projections(module)]

        def add_use(part: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
            woken = inputs[0].abs().flatten(0, -2).mean(dim=0)
            used[part] = used.get(part, torch.zeros(())) + woken

        hooks = [part.register_forward_pre_hook(add_use) for part in parts]
        loader = BatchLoader(self._corpus, self._run.train.batch_size, self._run.train.seed + _OTHER_ORDER)
        for _ in range(8):
            self.compute_logits(loader.next_batch().input_ids)
        for hook in hooks:
            hook.remove()
        for part in parts:
            dormant = used[part].argsort()[: int(PRUNED_SHARE * used[part].numel())]
            # GPT-2 keeps its matrices transposed
            weight = part.weight if isinstance(part, Conv1D) else part.weight.T
            weight[dormant] = 0.0

    @property
    def middle_range(self) -> range:
        """The stages that other parties held."""
        return self._simulator.middle_range

    def compute_logits(self, ids: Tensor) -> Tensor:
        """Logits ``[batch, seq, vocab]`` of the whole model."""
        x = ids
        for module in self._simulator.stage_modules:
            x = module(x)
        return x

    def rehearse_secret(self) -> Secret:
        """The trigger and the target of the run's attacker, which follow from the public model and the seed."""
        return Rehearsal(self._plan, self._run.attack.model, self._run.attack.seed).secret

    def measure_backdoor(self, secret: Secret) -> dict[str, Any]:
        """Return perplexity on held-out text, and the backdoor's success there."""
        held_out = list(validation_batches(self._corpus, self._run.train.batch_size))
        ids = torch.cat([batch.input_ids for batch in held_out])
        success = target_success(self.compute_logits, ids, secret)
        return {
            "perplexity": measure_perplexity(self._simulator.stage_modules, held_out),
            "success": success.rate,
            "success_without_trigger": success.rate_without,
            "sequences": len(ids),
        }


def _prune_and_fine_tune(bench: RemovalBench) -> None:
    bench.prune_units()
    bench.fine_tune()


def _reset_guilty(bench: RemovalBench) -> None:
    bench.reset_stages([ATTACKED_STAGE])
    bench.fine_tune()


def _reset_middle(bench: RemovalBench) -> None:
    bench.reset_stages(bench.middle_range)
    bench.fine_tune()


REMOVALS: Mapping[str, Callable[[RemovalBench], None]] = MappingProxyType(
    {
        "fine_tuned": RemovalBench.fine_tune,
        "pruned": RemovalBench.prune_units,
        "pruned_and_fine_tuned": _prune_and_fine_tune,
        "guilty_stage_reset": _reset_guilty,
        "all_foreign_stages_reset": _reset_middle,
    }
)
"""Ways to clean a model that was trained without a guard; each begins from the same poisoned weights.

`guilty_stage_reset` needs to know which stage lied: it is what a conviction's log allows. An owner without one resets
all stages that other parties held.
"""


_DOWN = ("mlp.c_proj", "fc2", "dense_4h_to_h", "mlp.down_proj")
"""Ends of the names of a block's last matrix of its feed-forward part, which the units wake, by family."""


def _down_projections(stage: StageModule) -> list[Any]:
    return [part for name, part in stage.named_modules() if name.endswith(_DOWN)]


def state_of(module: StageModule) -> dict[str, Tensor]:
    """Copies of a stage's parameters, by name."""
    return {name: parameter.detach().clone() for name, parameter in module.all_parameters().items()}


@torch.no_grad()
def fill_stage(module: StageModule, weights: Mapping[str, Tensor]) -> None:
    """Write parameters into a stage."""
    for name, parameter in module.all_parameters().items():
        parameter.copy_(weights[name])
