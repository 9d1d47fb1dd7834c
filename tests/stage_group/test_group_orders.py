"""What a group does not accept: words that are no orders, and models that its ranks cannot share."""

import pytest
import torch

from phalanx.errors import ConfigError, FrameError
from phalanx.models import LoraConfig, open_model
from phalanx.stage_group.group import check_plan
from phalanx.stage_group.orders import GroupCommand, cargo_of, read_order
from phalanx.testing.tiny import tiny_run
from phalanx.train.setup.layout import make_plan


@pytest.mark.parametrize(
    "line", [b"", b"null", b'{"deed":"obey","copy_id":0}', b'{"deed":"forward","copy_id":-1}', b"\xff\xfe"]
)
def test_what_is_no_order_is_refused(line):
    with pytest.raises(FrameError, match="sent no order"):
        read_order(line)


def test_an_order_comes_back_as_it_was_given():
    tensors = (torch.zeros(2, 3), None, torch.zeros(1, dtype=torch.bfloat16))
    order = GroupCommand(
        deed="recompute", copy_id=4, step=7, microbatch=2, cargo=tuple(map(cargo_of, tensors)), dropped=(1, 3)
    )

    assert read_order(order.model_dump_json().encode()) == order
    assert [cargo and cargo.shape for cargo in order.cargo] == [(2, 3), None, (1,)]


@pytest.fixture
def plan(tmp_path):
    run = tiny_run()
    return make_plan(run, open_model(run.model, tmp_path, 0))


def test_two_ranks_share_a_plain_model(plan):
    check_plan(plan, 2)


@pytest.mark.parametrize(
    ("ranks", "changes", "reason"),
    [
        (3, {}, "tp=3"),
        (2, {"adapter": LoraConfig(rank=2)}, "adapters are not cut"),
        (2, {"hub_config": {"attn_pdrop": 0.1}}, "attn_pdrop = 0.1"),
        (2, {"guard": {"recovery": "skip_layer"}}, "compares bits"),
    ],
)
def test_what_ranks_cannot_share_is_refused_with_the_reason(plan, ranks, changes, reason):
    for key in ("hub_config", "guard"):
        if key in changes:
            old = getattr(plan, key)
            new = {**old, **changes[key]} if isinstance(old, dict) else old.model_copy(update=changes[key])
            changes = {**changes, key: new}

    with pytest.raises(ConfigError, match=reason):
        check_plan(plan.model_copy(update=changes), ranks)
