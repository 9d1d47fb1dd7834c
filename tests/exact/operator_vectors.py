"""Inputs and digests of every operator of the law; run as a program it writes the vectors anew."""

import hashlib
import json
import sys
from pathlib import Path

import torch

from phalanx.exact import LAW, ExactArithmetic

VECTORS = Path(__file__).parents[1] / "vectors" / "exact" / "operators.json"
ROWS, SIZE = 37, 129


def numbers(name: str, *shape: int, low: float = -4.0, high: float = 4.0) -> torch.Tensor:
    """Numbers that follow from a name: integers of SHAKE-256 times a power of two."""
    count = torch.Size(shape).numel()
    raw = hashlib.shake_256(name.encode()).digest(4 * count)
    share = (torch.frombuffer(bytearray(raw), dtype=torch.int32) >> 8).double() * 2.0**-24 + 0.5
    return (share * (high - low) + low).float().reshape(shape)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def arguments() -> dict[str, tuple[tuple, dict]]:
    """Arguments of each operator by its name; several calls have a number behind it."""
    x, y = numbers("x", ROWS, SIZE), numbers("y", ROWS, SIZE)
    positive, weight, bias = numbers("p", ROWS, SIZE, low=0.001), numbers("w", SIZE), numbers("b", SIZE)
    mean, inverse = numbers("m", ROWS, 1), numbers("i", ROWS, 1, low=0.1, high=1.0)
    ids, log_probs = (torch.arange(ROWS) * 7) % SIZE, numbers("lp", ROWS, SIZE, low=-9.0, high=-0.01)
    deep = (numbers("l", 20, 5000), numbers("r", 5000, 30, low=-0.1, high=0.1))
    batch = (numbers("bl", 3, 17, 40), numbers("br", 3, 40, 23))
    both = {
        "aten.mm.default": (deep, {}),
        "aten.mm.default 2": ((numbers("ml", 160, 200), numbers("mr", 200, 96)), {}),
        "aten.bmm.default": (batch, {}),
        "aten.addmm.default": ((numbers("ab", 30), *deep), {}),
        "aten.baddbmm.default": ((numbers("bb", 3, 17, 23), *batch), {"beta": 0.5, "alpha": 0.3}),
        "aten._softmax.default": ((x, -1, False), {}),
        "aten._softmax_backward_data.default": ((x, positive, -1, torch.float32), {}),
        "aten._log_softmax.default": ((x, 0, False), {}),
        "aten._log_softmax_backward_data.default": ((x, log_probs, -1, torch.float32), {}),
        "aten.logsumexp.default": ((x, [-1]), {}),
        "aten.native_layer_norm.default": ((x, [SIZE], weight, bias, 1e-5), {}),
        "aten.native_layer_norm_backward.default": (
            (y, x, [SIZE], mean, inverse, weight, bias, [True, True, True]),
            {},
        ),
        "aten.sum.default": ((x,), {}),
        "aten.sum.dim_IntList": ((x, [0]), {}),
        "aten.mean.default": ((x,), {}),
        "aten.mean.dim": ((x, [-1], True), {}),
        "aten.linalg_vector_norm.default": ((x,), {}),
        "aten.embedding_dense_backward.default": ((x, ids % 9, 12, -1, False), {}),
        "aten.index_put.default": ((torch.zeros(9, SIZE), [ids % 9], x, True), {}),
        "aten.index_put_.default": ((torch.zeros(9, SIZE), [ids % 9], x, True), {}),
        "aten.scatter_add.default": ((y, 1, (ids.unsqueeze(1) + torch.arange(SIZE)) % 5, x), {}),
        "aten.index_add.default": ((numbers("ia", 9, SIZE), 0, ids % 9, x), {}),
        "aten.nll_loss_forward.default": ((log_probs, ids, None, 1, 3), {}),
        "aten.div.Tensor": ((x, y), {}),
        "aten.div.Scalar": ((x, 3.0), {}),
        "aten.add.Tensor": ((x, y), {"alpha": 0.3}),
        "aten.sub.Tensor": ((x, y), {"alpha": 0.3}),
        "aten.add.Scalar": ((x, 0.7, 0.3), {}),
        "aten.sub.Scalar": ((x, 0.7, 0.3), {}),
        "aten.rsub.Scalar": ((x, 1.0, 0.3), {}),
        "aten.add_.Tensor": ((x.clone(), y), {"alpha": 0.3}),
        "aten.addcmul.default": ((x, x, y), {"value": 0.3}),
        "aten.pow.Tensor_Scalar": ((x, 3), {}),
        "aten.pow.Tensor_Scalar 2": ((positive, 0.25), {}),
        "aten.pow.Scalar": ((10000.0, x), {}),
        "aten.pow.Tensor_Tensor": ((positive, y), {}),
        "aten.gelu.default": ((x,), {}),
        "aten.gelu.default 2": ((x,), {"approximate": "tanh"}),
        "aten.gelu_backward.default": ((y, x), {}),
        "aten.gelu_backward.default 2": ((y, x), {"approximate": "tanh"}),
        "aten.log_sigmoid_backward.default": ((y, x, torch.empty(0)), {}),
        "aten.softplus_backward.default": ((y, x, 1, 2), {}),
        "aten.softplus.default": ((x, 1, 2), {}),
        "aten.bernoulli_.float": ((torch.empty(999), 0.3), {"generator": generator()}),
        "aten.uniform_.default": ((torch.empty(999), -0.3, 0.7), {"generator": generator()}),
        "aten.normal_.default": ((torch.empty(999), 0.5, 0.02), {"generator": generator()}),
    }
    for name in ("sigmoid_backward", "tanh_backward", "silu_backward"):
        both[f"aten.{name}.default"] = ((y, numbers("u", ROWS, SIZE, low=-1.0, high=1.0)), {})
    for name in ("log", "sqrt", "rsqrt", "reciprocal"):
        both[f"aten.{name}.default"] = ((positive,), {})
    for name in ("exp", "expm1", "sin", "cos", "tanh", "erf", "sigmoid", "silu", "log_sigmoid_forward"):
        both[f"aten.{name}.default"] = ((x * 3,), {})
    return both


def digests() -> dict[str, str]:
    """The digest of the results of each operator."""
    operators, result = {str(operator): operator for operator in LAW}, {}
    for name, (positional, named) in sorted(arguments().items()):
        with ExactArithmetic("exact"):
            found = operators[name.split()[0]](*positional, **named)
        tensors = found if isinstance(found, tuple) else (found,)
        raw = b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors if tensor is not None)
        result[name] = hashlib.sha256(raw).hexdigest()
    with ExactArithmetic("exact_fast"):
        fast = torch.ops.aten.mm.default(*arguments()["aten.mm.default"][0])
    result["aten.mm.default exact_fast"] = hashlib.sha256(fast.numpy().tobytes()).hexdigest()
    return result


if __name__ == "__main__":
    text = json.dumps(digests(), indent=1, sort_keys=True) + "\n"
    if sys.argv[1:] == ["--print"]:
        sys.stdout.write(text)
    else:
        VECTORS.parent.mkdir(parents=True, exist_ok=True)
        VECTORS.write_text(text)
