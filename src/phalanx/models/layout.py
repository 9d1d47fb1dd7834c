"""The layers of each stage; imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass

from phalanx.errors import ConfigError


@dataclass(frozen=True)
class StageSpec:
    """One stage of a pipeline: layers ``first_layer <= layer < end_layer``.

    The first stage begins at layer 0 and embeds tokens, or at a later one where other parties have the front of the
    model: it is fed hidden states then.
    """

    index: int
    num_stages: int
    first_layer: int
    end_layer: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.num_stages or not 0 <= self.first_layer < self.end_layer:
            raise ConfigError(
                f"stage {self.index} of {self.num_stages} with layers {self.first_layer} to "
                f"{self.end_layer}: expected an index below the number of stages and at least one layer"
            )
        if self.index and not self.first_layer:
            raise ConfigError(f"stage {self.index}: starts at layer {self.first_layer}; only stage 0 starts at layer 0")

    @property
    def is_first(self) -> bool:
        """True for the stage that is fed a batch: tokens, or hidden states where the model's front is elsewhere."""
        return self.index == 0

    @property
    def has_embedding(self) -> bool:
        """True for the stage that has the embedding."""
        return self.first_layer == 0

    @property
    def is_last(self) -> bool:
        """True for the stage that has the head."""
        return self.index == self.num_stages - 1

    @property
    def num_layers(self) -> int:
        """Layers that the stage holds."""
        return self.end_layer - self.first_layer


def check_stages(num_stages: int, num_layers: int) -> None:
    """Refuse more stages than a model has layers."""
    if num_stages > num_layers:
        raise ConfigError(
            f"pipeline.stages: {num_stages} stages need at least {num_stages} layers, the model has "
            f"{num_layers}; lower stages to {num_layers}"
        ).with_facts(
            code="PHX-C010",
            key="pipeline.stages",
            found=str(num_stages),
            expected=f"at most {num_layers}",
            do=f"lower stages to {num_layers}",
        )


def check_length(sequence_length: int, longest: int | None) -> None:
    """Refuse sequences that are longer than a model's table of positions.

    Args:
        longest: Positions; None where they are computed.
    """
    if longest is not None and sequence_length > longest:
        raise ConfigError(
            f"data.sequence_length = {sequence_length}: the model has positions for {longest}; lower it"
        ).with_facts(
            code="PHX-C011",
            key="data.sequence_length",
            found=str(sequence_length),
            expected=f"at most {longest}",
            do="lower it",
        )


def check_vocabulary(num_tokens: int, num_embeddings: int) -> None:
    """Refuse a tokenizer with more tokens than a model has embeddings."""
    if num_tokens > num_embeddings:
        raise ConfigError(
            f"data.tokenizer has {num_tokens} tokens, the model {num_embeddings}; "
            "raise vocab_size in model.architecture or lower it in data.tokenizer"
        ).with_facts(
            code="PHX-C022",
            key="data.tokenizer",
            found=str(num_tokens),
            expected=f"at most {num_embeddings}",
            do="raise vocab_size in model.architecture or lower it in data.tokenizer",
        )


def partition_layers(
    num_layers: int,
    num_stages: int,
    layers_per_stage: tuple[int, ...] | None,
    first_cost: float,
    head_cost: float,
    *,
    ends_in_one_process: bool = False,
    front: int = 0,
) -> tuple[StageSpec, ...]:
    """Cut the layers into contiguous stages.

    Args:
        num_stages: Stages, each with at least one layer.
        layers_per_stage: Layers of every stage; None balances them.
        first_cost: Work of the embedding, which the first stage does, in layers.
        head_cost: Work of the head, which the last stage does, in layers.
        ends_in_one_process: Whether one process has the first and the last stage and so the work of both.
        front: Layers before them, which other parties have.

    Returns:
        One spec a stage. Balanced: the busiest process is as little busy as can be, and among such cuts the sum of
        squares of the processes' work is smallest; remaining ties give later stages more layers.
    """
    if num_stages < 1:
        raise ConfigError(f"pipeline.stages: found {num_stages}; expected at least 1")
    check_stages(num_stages, num_layers)
    if layers_per_stage is not None:
        sizes = _checked_sizes(num_layers, num_stages, layers_per_stage)
    elif ends_in_one_process and num_stages > 2:
        sizes = _balance_around(num_layers, num_stages, first_cost, head_cost)
    else:
        sizes = _balance_layers(num_layers, num_stages, first_cost, head_cost)
    ends = [front + sum(sizes[: index + 1]) for index in range(num_stages)]
    return tuple(
        StageSpec(index, num_stages, end_layer - size, end_layer)
        for index, (size, end_layer) in enumerate(zip(sizes, ends, strict=True))
    )


def _checked_sizes(num_layers: int, num_stages: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    if len(sizes) != num_stages or min(sizes) < 1 or sum(sizes) != num_layers:
        raise ConfigError(
            f"pipeline.layers_per_stage: found {list(sizes)}; expected {num_stages} numbers of at least 1 "
            f"that add up to the model's {num_layers} layers"
        )
    return sizes


def _balance_layers(num_layers: int, num_stages: int, first_cost: float, head_cost: float) -> tuple[int, ...]:
    _check_costs(first_cost, head_cost)

    def cost(stage: int, size: int) -> float:
        return size + first_cost * (stage == 0) + head_cost * (stage == num_stages - 1)

    limit = _best_cuts(num_layers, num_stages, cost, squares_below=None)[0]
    return _best_cuts(num_layers, num_stages, cost, squares_below=limit)[1]


def _balance_around(num_layers: int, num_stages: int, first_cost: float, head_cost: float) -> tuple[int, ...]:
    """Balance when the ends share a process: the middle stages are alike, so only the size of the ends is open."""
    _check_costs(first_cost, head_cost)
    middles = num_stages - 2

    def spread(layers: int) -> tuple[int, ...]:
        return tuple(layers * (n + 1) // middles - layers * n // middles for n in range(middles))

    cuts = [
        (first, *spread(num_layers - first - last), last)
        for first in range(1, num_layers - middles)
        for last in range(1, num_layers - middles - first + 1)
    ]

    def burden(cut: tuple[int, ...]) -> tuple[float, float, float, tuple[int, ...]]:
        first, last = cut[0] + first_cost, cut[-1] + head_cost
        work = (first + last, *(float(size) for size in cut[1:-1]))
        # as many layers before as after: what is in flight at the first stage waits for all others
        return max(work), sum(w * w for w in work), abs(first - last), cut

    return min(cuts, key=burden)


def _check_costs(first_cost: float, head_cost: float) -> None:
    if not (0 <= first_cost < float("inf") and 0 <= head_cost < float("inf")):
        raise ConfigError(f"stage costs {first_cost} and {head_cost}: expected finite numbers of at least 0")


def _best_cuts(
    num_layers: int, num_stages: int, cost: Callable[[int, int], float], squares_below: float | None
) -> tuple[float, tuple[int, ...]]:
    """Minimise the costliest stage, or the sum of squares where no stage is above `squares_below`."""
    # number of layers placed so far -> (value, sizes) of the best cut of them
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(num_stages):
        step: dict[int, tuple[float, tuple[int, ...]]] = {}
        for done, (value, sizes) in best.items():
            for size in range(1, num_layers - done - (num_stages - stage - 1) + 1):
                here = cost(stage, size)
                if squares_below is not None and here > squares_below:
                    break
                total = max(value, here) if squares_below is None else value + here * here
                candidate = (total, (*sizes, size))
                if done + size not in step or candidate < step[done + size]:
                    step[done + size] = candidate
        best = step
    return best[num_layers]
