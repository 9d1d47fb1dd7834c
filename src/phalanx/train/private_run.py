"""What a run with a section ``[privacy]`` cannot have, and why: a bound is quoted for what earns it alone."""

from collections.abc import Iterator
from typing import Any

_ENGINE = (
    "[privacy] is carried by the ranks of [parallel] and the sites of [federated] so far: {}; add one of them, or "
    "remove [privacy]"
)
_SOME_OF_IT = "a row's gradient is clipped by its norm over all layers, and parties of [{}] each see some of them"
_LEARNED = ("causal_lm", "weighted_causal_lm")
_LEARNED_AT_SITES = ("causal_lm", "classification")


def privacy_fault(run: Any) -> str | None:
    """Say what a run with a section ``[privacy]`` has that its bound would not cover; None where nothing is."""
    if run.privacy is None:
        return None
    if run.parallel is None and run.federated is None:
        return _ENGINE.format(_SOME_OF_IT.format("pipeline" if run.split is None else "split"))
    return next((f"[privacy] has no {said}" for said in _faults(run)), None)


def _faults(run: Any) -> Iterator[str]:
    if run.federated is None:
        yield from _of_layout(run)
    elif run.parallel is not None:
        yield "[parallel] beside [federated]: ranks of a site are not shown yet to add the noise once; remove one"
    elif run.has_site_stages:
        yield f"[pipeline] beside [federated]: {_SOME_OF_IT.format('pipeline')}; remove one"
    elif run.federated.privacy is not None:
        yield "federated.privacy: a site would have two budgets, and tell of neither which one holds; remove one"
    yield from _of_adapter(run.model.adapter)
    yield from _of_data(run)
    train, learned = run.train, _LEARNED if run.federated is None else _LEARNED_AT_SITES
    if train.objective_kind not in learned:
        yield (
            f'train.objective = "{train.objective_kind}": its loss is not known to be a sum over rows that each depend '
            f"on one example; take one of {', '.join(learned)}"
        )
    if train.precision != "fp32":
        yield f'train.precision = "{train.precision}": a norm in it does not bound what is added; take "fp32"'
    if train.neftune_alpha is not None:
        yield "train.neftune_alpha: its noise follows from a row's place among those that were drawn; leave it out"
    if run.tracking and run.federated is None:
        yield "tracking: the loss of training rows would leave this machine without noise; remove it"


def _of_layout(run: Any) -> Iterator[str]:
    if run.deepspeed is not None:
        yield "[deepspeed]: it joins gradients before single rows could be clipped; remove one"
    layout = run.parallel
    if layout.most_dp > 1:
        yield "parallel.dp: data parallel copies are not shown yet to add the noise once; set dp and max_dp to 1"
    for name in ("tp", "pp", "cp"):
        if (found := getattr(layout, name)) > 1:
            yield (
                f"parallel.{name} = {found}: each rank would see a part of a row's gradient, and clip by a part of its "
                "norm; set it to 1"
            )
    plain: dict[str, object] = {"zero": 0, "gradient_compression": "none", "activation_checkpointing": "none"}
    for name, only in {**plain, "compile": False, "outer": None}.items():
        if getattr(layout, name) != only:
            yield f"parallel.{name}: hooks that tell rows apart are not tried with it; leave it out"


def _of_adapter(adapter: Any) -> Iterator[str]:
    if adapter is None:
        return
    if adapter.kind != "lora":
        yield f'model.adapter.kind = "{adapter.kind}": single rows are not shown to be told apart; take "lora"'
    elif adapter.quantize is not None:
        yield "model.adapter.quantize: hooks that tell rows apart are not tried with it; leave it out"
    elif adapter.dora:
        yield "model.adapter.dora: Opacus clips the sizes of its outputs wrongly or not at all; set it to false"


def _of_data(run: Any) -> Iterator[str]:
    data = run.data
    if data.tokenizer.kind == "bpe":
        yield (
            'data.tokenizer.kind = "bpe": a vocabulary that is trained on the rows tells of them without noise; take '
            '"model", or "file" with one of public text'
        )
    for name in ("phases", "skip"):
        if getattr(data, name, ()):
            yield f"data.{name}: every row must have the same chance to be drawn in each step; leave it out"
