"""What a model, an optimizer or a machine cannot do with a layout is refused with what to change."""

import pytest
from rank_layouts import LAYOUTS, architecture, why_refused

from phalanx.errors import ConfigError
from phalanx.parallel import ParallelConfig, StepWorkload, check_layout
from phalanx.parallel.model.compiled import why_no_compiler
from phalanx.planner.model.families import FAMILIES


def check(family="gpt2", load=None, **parallel):
    numbers = {"batch_size": 8, "microbatches": 4, "sequence_length": 16, **(load or {})}
    config = architecture(family)
    if "sliding_window" not in config:
        # as transformers writes it into every config.json of a family that may have windows
        config["layer_types"] = ["full_attention"] * 4
    check_layout(ParallelConfig(**parallel), config, StepWorkload(**numbers))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"tp": 2, "load": {"adapted": ("c_attn", "c_proj")}}, "adapters on c_proj.*take attn.c_attn, mlp.c_fc"),
        ({"family": "llama", "tp": 2, "load": {"adapted": ("down_proj",)}}, "adapters on down_proj"),
        ({"tp": 2, "load": {"optimizer": "adafactor"}}, "rows and columns of whole matrices"),
        ({"dp": 2, "zero": 2, "load": {"optimizer": "adafactor"}}, "set tp to 1 and zero to 0 or 1"),
        ({"family": "bloom", "cp": 2, "context": "ring"}, "adds a bias.*the nearest that works is cp=2$"),
        ({"cp": 4, "context": "ring", "load": {"sequence_length": 12}}, "8 chunks.*the nearest that works is cp=4$"),
        ({"cp": 2, "context": "ring", "load": {"attention": "eager"}}, 'take attention = "sdpa", or context'),
        (
            {"cp": 2, "context": "ring", "load": {"attends": "documents"}},
            "kernels know no mask",
        ),
        *(
            ({**cut, "load": {"num_prompt_tokens": 3}}, 'kind = "prompt_encoder" join the embedding.*take kind = "ptu')
            for cut in ({"tp": 2}, {"pp": 2}, {"cp": 2})
        ),
        (
            {"dp": 2, "zero": 3, "gradient_compression": "int8_gathers", "load": {"device": "cuda"}},
            "on CPUs alone, and the device is cuda",
        ),
        ({"family": "t5", "dp": 2, "zero": 2}, "all blocks of t5 read what its first one learns"),
        ({"family": "t5", "tp": 2}, "nearest that works is "),
        ({"family": "balanced", "dp": 2, "compile": True}, "losses of routers are read between the parts of a block"),
        *(
            ({"family": "balanced", "dp": 2, "zero": zero, "activation_checkpointing": "selective"}, "loss of a router")
            for zero in (2, 3)
        ),
        ({"family": "t5", "cp": 2}, "nearest that works is "),
        ({"family": "odd", "cp": 2}, "does not divide 3 attention heads.*nearest that works is cp=2 context=ring$"),
    ],
)
def test_what_a_layout_cannot_do_is_refused(keys, words):
    with pytest.raises(ConfigError, match=words):
        check(**keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"tp": 2, "load": {"adapted": ()}},
        {"tp": 2, "load": {"adapted": ("c_fc",)}},
        {"dp": 2, "load": {"adapted": ("c_proj",)}},
        {"pp": 2, "load": {"optimizer": "adafactor"}},
        {"dp": 2, "zero": 1, "load": {"optimizer": "adafactor"}},
        {"family": "t5", "dp": 2, "pp": 2, "zero": 1},
        {"dp": 2, "zero": 3, "load": {"num_prompt_tokens": 3}},
        {"tp": 2, "cp": 4, "context": "ring"},
        {"cp": 2, "load": {"attention": "eager"}},
        {"tp": 2, "cp": 2, "load": {"attends": "documents"}},
    ],
)
def test_what_it_can_do_is_not(keys):
    check(**keys)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layout_is_a_familys_or_is_refused_by_its_axis_the_family_and_what_to_set(family):
    for parallel in LAYOUTS:
        why = why_refused(family, parallel)
        if why is None:
            check(family, **parallel)
            continue
        with pytest.raises(ConfigError, match=why):
            check(family, **parallel)


def test_dropout_in_attention_is_refused_in_a_ring_alone():
    dropping = {**architecture("gpt2"), "attn_pdrop": 0.1}

    check_layout(ParallelConfig(cp=2), dropping, StepWorkload(8, 4, 16))
    with pytest.raises(ConfigError, match=r"drops nothing.*asks for 0\.1; .*nearest that works is cp=2$"):
        check_layout(ParallelConfig(cp=2, context="ring"), dropping, StepWorkload(8, 4, 16))


@pytest.mark.parametrize(
    "layout", [{"pp": 2, "schedule": "interleaved-zero-bubble"}, {"pp": 4, "schedule": "zero-bubble"}]
)
def test_a_middle_stage_that_torch_cannot_halve_is_refused(layout):
    routed = {**architecture("balanced"), "output_router_logits": True}
    for hub_config in (architecture("opt"), routed):
        with pytest.raises(ConfigError, match=r"cannot halve the backward pass .* take \"1f1b\""):
            check_layout(ParallelConfig(**layout), hub_config, StepWorkload(8, 4, 16))
        check_layout(ParallelConfig(pp=2, schedule="zero-bubble"), hub_config, StepWorkload(8, 4, 16))
    check_layout(ParallelConfig(**layout), architecture("llama"), StepWorkload(8, 4, 16))


def test_bloom_that_cuts_its_own_matrices_is_refused():
    odd = {**architecture("bloom"), "slow_but_exact": True, "pretraining_tp": 2}

    for parallel in (ParallelConfig(tp=2), ParallelConfig(cp=2)):
        with pytest.raises(ConfigError, match="slow_but_exact = true cuts matrices itself"):
            check_layout(parallel, odd, StepWorkload(8, 4, 16))


def test_a_machine_without_a_compiler_says_so(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)

    with pytest.raises(ConfigError, match="compile: no C\\+\\+ compiler"):
        check(dp=2, compile=True)


def test_a_gpu_needs_another_compiler():
    found = why_no_compiler("cuda")

    assert found is None or "triton" in found
