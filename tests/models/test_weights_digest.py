"""One digest over all weights, whatever the layout."""

import hashlib
import struct

import pytest
import torch
from tiny_models import build_all, named, tiny_source, whole_model

from phalanx.errors import ModelError
from phalanx.models import weights_digest


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_every_layout_of_one_model_has_the_digest_of_the_whole(tmp_path, name):
    source = tiny_source(name, tmp_path)
    digests = {weights_digest(named(build_all(source, stages)).items()) for stages in (1, 2, 4)}

    assert digests == {weights_digest(whole_model(source).named_parameters())}


def test_order_and_strides_do_not_matter():
    a, b = torch.arange(6.0).reshape(2, 3), torch.ones(2)
    strided = a.t().contiguous().t()

    assert weights_digest([("a", a), ("b", b)]) == weights_digest([("b", b), ("a", strided)])


@pytest.mark.parametrize(
    "other",
    [
        [("b", torch.zeros(2))],
        [("a", torch.zeros(1, 2))],
        [("a", torch.zeros(2, dtype=torch.float16))],
        [("a", torch.tensor([0.0, -0.0]))],
        [("a", torch.zeros(2)), ("b", torch.zeros(0))],
        [],
    ],
)
def test_any_other_name_shape_type_or_bit_has_another_digest(other):
    assert weights_digest(other) != weights_digest([("a", torch.zeros(2))])


def test_the_value_is_the_documented_sum_over_names_and_bytes():
    tensors = [("w", torch.tensor([1.0, 2.0])), ("v", torch.tensor(3, dtype=torch.bfloat16))]

    by_hand = b'["v","torch.bfloat16",[],2]\n' + b"\x40\x40"
    by_hand += b'["w","torch.float32",[2],8]\n' + struct.pack("<2f", 1.0, 2.0)
    assert weights_digest(tensors) == hashlib.sha256(by_hand).hexdigest()


def test_a_name_given_twice_is_refused():
    with pytest.raises(ModelError, match="'a' is given twice"):
        weights_digest([("a", torch.zeros(1)), ("a", torch.zeros(1))])


def test_a_type_without_plain_bytes_is_refused():
    with pytest.raises(ModelError, match="complex128"):
        weights_digest([("a", torch.zeros(1, dtype=torch.complex128))])
