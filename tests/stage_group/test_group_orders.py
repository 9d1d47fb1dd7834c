"""What a group does not accept: words that are no orders, and models that its ranks cannot share."""

import pytest
import torch

from phalanx.errors import ConfigError, FrameError
from phalanx.models import LoraConfig, PrefixConfig, PromptEncoderConfig, open_model
from phalanx.pipeline import PartyLayout, RowPrivacy
from phalanx.stage_group.group import check_plan
from phalanx.stage_group.orders import GroupCommand, describe_tensor, read_order
from phalanx.testing.tiny import tiny_run
from phalanx.train.setup.layout import make_plan


@pytest.mark.parametrize(
    "line", [b"", b"null", b'{"operation":"obey","copy_id":0}', b'{"operation":"forward","copy_id":-1}', b"\xff\xfe"]
)
def test_what_is_no_order_is_refused(line):
    with pytest.raises(FrameError, match="sent no order"):
        read_order(line)


def test_an_order_comes_back_as_it_was_given():
    cargo = {"x": describe_tensor(torch.zeros(2, 3)), "gradient": describe_tensor(torch.zeros(1, dtype=torch.bfloat16))}
    order = GroupCommand(operation="recompute", copy_id=4, step=7, microbatch=2, cargo=cargo, dropped=(1, 3))

    assert read_order(order.model_dump_json().encode()) == order
    assert [one.shape for one in order.cargo.values()] == [(2, 3), (1,)]


def test_numbers_of_an_update_arrive_with_all_their_bits():
    order = GroupCommand(operation="update", copy_id=0, learning_rate=1 / 3, clip_coefficient=2**0.5)

    assert read_order(order.model_dump_json().encode()) == order


@pytest.fixture
def plan(tmp_path):
    run = tiny_run()
    return make_plan(run, open_model(run.model, tmp_path, 0))


def test_ranks_share_a_plain_model(plan):
    check_plan(plan, PartyLayout(dp=2, tp=2, zero=2))


@pytest.mark.parametrize(
    ("layout", "changes", "reason"),
    [
        (PartyLayout(tp=3), {}, "tp=3"),
        (PartyLayout(dp=4), {}, "dp=4"),
        (
            PartyLayout(dp=2),
            {"adapter": PromptEncoderConfig(kind="prompt_encoder")},
            'kind = "prompt_encoder": later stages have nothing to train.* one process',
        ),
        (PartyLayout(dp=2), {"adapter": LoraConfig(quantize="nf4")}, 'quantize = "nf4": packed matrices'),
        (PartyLayout(dp=2), {"adapter": LoraConfig(dropout=0.1)}, r"adapter\.dropout = 0\.1: .* set it to 0"),
        (PartyLayout(tp=2), {"adapter": LoraConfig(targets=("c_proj",))}, "adapters on c_proj.* are not cut"),
        (PartyLayout(cp=2), {"adapter": PrefixConfig(kind="ptuning")}, 'kind = "ptuning" come before whole'),
        (PartyLayout(tp=2), {"hub_config": {"attn_pdrop": 0.1}}, "attn_pdrop = 0.1"),
        (PartyLayout(dp=2), {"hub_config": {"resid_pdrop": 0.1}}, "resid_pdrop = 0.1"),
        (
            PartyLayout(tp=2),
            {"privacy": RowPrivacy(clip_norm=1, noise_multiplier=1, mean_rows=1)},
            "clip a row by a part",
        ),
    ],
)
def test_what_ranks_cannot_share_is_refused_with_the_reason(plan, layout, changes, reason):
    if "hub_config" in changes:
        changes = {**changes, "hub_config": {**plan.hub_config, **changes["hub_config"]}}

    with pytest.raises(ConfigError, match=reason):
        check_plan(plan.model_copy(update=changes), layout)


def test_ranks_that_share_products_drop_the_same_hidden_numbers_as_a_whole_stage(plan):
    dropping = plan.model_copy(update={"hub_config": {**plan.hub_config, "resid_pdrop": 0.1}})

    check_plan(dropping, PartyLayout(tp=2))
