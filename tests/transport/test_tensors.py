import pytest
import torch

from phalanx.errors import FrameError
from phalanx.transport.tensors import tensor_buffers, tensor_from

DTYPES = [
    *[torch.float64, torch.float32, torch.bfloat16, torch.float16],
    *[torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8],
]


def some_tensor(dtype, shape=(3, 5)):
    return (torch.arange(torch.Size(shape).numel()) * 7 % 100).to(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (3, 5), (2, 3, 4)])
def test_a_tensor_comes_back_bit_for_bit(dtype, shape):
    tensor = some_tensor(dtype, shape)

    claim = {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape)}
    back = tensor_from(bytes(tensor_buffers(tensor)), dtype, shape, claim)

    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)


def test_nan_and_signed_zero_keep_their_bits():
    tensor = torch.tensor([float("nan"), -0.0, float("inf")])

    back = tensor_from(tensor_buffers(tensor), torch.float32, (3,))

    assert bytes(tensor_buffers(back)) == bytes(tensor_buffers(tensor))


def test_buffers_share_the_memory_of_their_tensor_and_cannot_change_it():
    tensor = torch.zeros(4)

    buffer = tensor_buffers(tensor)
    tensor[0] = 1.0

    assert bytes(buffer[:4]) == b"\x00\x00\x80\x3f"
    assert buffer.readonly


def test_a_tensor_that_needs_gradients_can_be_sent():
    tensor = torch.ones(3, requires_grad=True)

    assert len(tensor_buffers(tensor)) == 12


@pytest.mark.parametrize("offset", [0, 1, 3, 17])
def test_a_received_tensor_is_aligned_like_any_other_wherever_its_bytes_began(offset):
    tensor = torch.randn(33)
    frame = bytes(offset) + bytes(tensor_buffers(tensor))

    back = tensor_from(memoryview(frame)[offset:], torch.float32, (33,))

    assert back.data_ptr() % 64 == 0
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("size_bytes", [0, 4, 59, 61, 120])
def test_bytes_of_another_size_are_refused(size_bytes):
    with pytest.raises(FrameError, match=f"found {size_bytes} bytes, expected 60"):
        tensor_from(bytes(size_bytes), torch.float32, (3, 5))


@pytest.mark.parametrize(
    "claim",
    [
        {"dtype": "float16", "shape": [3, 5]},
        {"dtype": "float32", "shape": [5, 3]},
        {"dtype": "float32", "shape": [15]},
        {"dtype": "float32", "shape": "3,5"},
        {"dtype": "float32"},
        {"dtype": None, "shape": None},
        {"dtype": "float32", "shape": [3, 5], "more": 1},
        {},
    ],
)
def test_a_claim_that_is_not_what_the_receiver_expects_is_refused(claim):
    with pytest.raises(FrameError, match="the sender claims"):
        tensor_from(bytes(60), torch.float32, (3, 5), claim)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 5).t(),
        torch.zeros(3, device="meta"),
        torch.zeros(3).to_sparse(),
        torch.zeros(3, dtype=torch.bool),
        torch.zeros(3, dtype=torch.complex64),
    ],
    ids=["strided", "meta", "sparse", "bool", "complex"],
)
def test_a_tensor_that_cannot_cross_is_refused(tensor):
    with pytest.raises(FrameError, match="tensor"):
        tensor_buffers(tensor)
