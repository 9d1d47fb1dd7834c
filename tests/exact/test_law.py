"""The law of every operator: vectors, orders of additions, refusals, and the accuracy that is promised."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import operator_vectors
import pytest
import torch

from phalanx.errors import ConfigError, ModelError
from phalanx.exact import LAW, ExactArithmetic, functions, fused, products, rounded_cosine
from phalanx.exact.products import BITS, FixedPoint, multiply

OTHER_PROCESSORS = {
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "no vectors": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}
HELD = json.loads(operator_vectors.VECTORS.read_text())


def matrices(rows=70, inner=3000, columns=90):
    return operator_vectors.numbers("left", rows, inner), operator_vectors.numbers("right", columns, inner)


def test_every_operator_has_the_bits_of_its_vectors():
    """An operator that changes without its vectors turns this red; `operator_vectors.py` writes them anew."""
    assert operator_vectors.digests() == HELD


def test_every_operator_of_the_law_has_vectors():
    assert {name.split()[0] for name in HELD} == {str(operator) for operator in LAW}


def changed_names():
    found = operator_vectors.digests()
    return {
        name.split()[0].removeprefix("aten.").removesuffix(".default") for name in HELD if found[name] != HELD[name]
    }


def test_an_operator_that_changes_without_its_vectors_is_named(monkeypatch):
    """Equal up to a rounding, and faster: what a tidy hand would write."""
    monkeypatch.setitem(LAW, torch.ops.aten.silu.default, lambda x: x / functions.exp(-x).add_(1.0))

    assert changed_names() == {"silu"}


def test_a_function_that_changes_without_its_vectors_names_all_that_call_it(monkeypatch):
    monkeypatch.setattr(functions, "_EXP", (*functions._EXP[:4], 1 / 6, functions._EXP[5]))

    assert changed_names() >= {"exp", "sigmoid", "silu", "_softmax", "_log_softmax_backward_data"}
    assert not changed_names() & {"mm", "bmm", "sum", "erf", "normal_", "native_layer_norm"}


def test_a_product_with_other_bits_of_an_operand_is_named(monkeypatch):
    monkeypatch.setitem(BITS, "exact", 20)
    monkeypatch.setitem(products._DIGITS, 20, 3)

    assert changed_names() == {"mm", "addmm", "bmm", "baddbmm"}


@pytest.mark.slow
def test_compiled_loops_have_the_bits_of_eager_operations(tmp_path, monkeypatch):
    a, b = matrices(rows=300, inner=2100, columns=260)
    a[3, 7], b[5, 6], a[9], a[10, 0], a[11] = torch.nan, torch.inf, 0.0, 2.0, -0.0
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fused.open_kernels.cache_clear()
    assert fused.open_kernels() is None
    eager = {(grade, turned): rounded_product(a, b, BITS[grade], turned) for grade in BITS for turned in (False, True)}

    fused.build_library()

    assert fused.open_kernels() is not None
    for (grade, turned), expected in eager.items():
        found = rounded_product(a, b, BITS[grade], turned)
        assert all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(found, expected, strict=True))
    assert operator_vectors.digests() == HELD
    fused.open_kernels.cache_clear()


def rounded_product(a, b, bits, turned):
    left = FixedPoint.round_rows(a.mT.contiguous().mT if turned else a, bits)
    right = FixedPoint.round_rows(b, bits)
    product = multiply(left, right)
    return [left.integers, *(digit.float() for digit in left.digits), left.scale, product, product.signbit().float()]


def test_a_machine_without_a_compiler_does_without_compiled_loops(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    fused.open_kernels.cache_clear()

    with pytest.raises(ConfigError, match=r"no-compiler.*set CXX to a C\+\+17 compiler, or do without"):
        fused.build_library()

    assert fused.open_kernels() is None
    assert [path.name for path in (tmp_path / "phalanx").iterdir()] == []
    fused.locate_library().write_bytes(b"no library")
    fused.open_kernels.cache_clear()
    assert fused.open_kernels() is None
    fused.open_kernels.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("variables", OTHER_PROCESSORS.values(), ids=OTHER_PROCESSORS)
def test_the_vectors_are_those_of_other_instruction_sets(variables):
    program = Path(operator_vectors.__file__)
    result = subprocess.run(
        [sys.executable, str(program), "--print"], env=os.environ | variables, stdout=subprocess.PIPE, check=True
    )

    assert json.loads(result.stdout) == HELD


@pytest.mark.slow
@pytest.mark.skipif("ARM_PYTHON" not in os.environ, reason="ARM_PYTHON names no Python of another processor")
def test_the_vectors_are_those_of_an_emulated_processor():
    command = [os.environ["ARM_PYTHON"], operator_vectors.__file__, "--print"]
    result = subprocess.run(command, stdout=subprocess.PIPE, check=True)

    assert json.loads(result.stdout) == HELD


@pytest.mark.parametrize("grade", BITS)
@pytest.mark.parametrize("inner", [1, 40, 2048, 2049, 5000])
def test_products_do_not_depend_on_order_library_threads_or_digits(grade, inner, monkeypatch):
    left, right = (FixedPoint.round_rows(x, BITS[grade]) for x in matrices(inner=inner))
    found = multiply(left, right)
    monkeypatch.setattr(products, "_MIN_WORK", 0)
    by_digits = multiply(left, right)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    by_two = multiply(left, right)
    torch.set_num_threads(threads)
    total = np.zeros((70, 90))
    for first in range(0, inner, products.RUN):
        run = np.arange(first, min(inner, first + products.RUN))[::-1]
        halves = run[: len(run) // 3], run[len(run) // 3 :]
        total += sum(left.wide.numpy()[:, half] @ right.wide.numpy()[:, half].T for half in halves)
    by_numpy = (torch.from_numpy(total) * left.scale * right.scale.mT).float()

    assert torch.equal(found, by_digits)
    assert torch.equal(found, by_two)
    assert torch.equal(found, by_numpy)


@pytest.mark.parametrize(("grade", "error"), [("exact", 4e-6), ("exact_fast", 6e-4)])
def test_products_are_as_accurate_as_promised(grade, error):
    a, b = matrices()
    truth = a.double() @ b.double().T

    found = multiply(FixedPoint.round_rows(a, BITS[grade]), FixedPoint.round_rows(b, BITS[grade]))

    assert float((found - truth).abs().max() / truth.abs().max()) < error


def test_the_greatest_integers_are_exact_and_a_machine_that_cuts_int8_sums_is_not_used(monkeypatch):
    extreme = torch.full((64, 2048), 2.0**21)
    extreme[::2] = -(2.0**21) + 1
    both = FixedPoint(extreme, torch.ones(64, 1, dtype=torch.float64), 21)
    monkeypatch.setattr(products, "_MIN_WORK", 0)
    by_digits = multiply(both, both)
    monkeypatch.setattr(products, "digits_are_exact", lambda: False)

    assert torch.equal(by_digits, multiply(both, both))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so_in_its_row_alone(bad):
    a, b = matrices(inner=50)
    a[3, 7] = bad
    with ExactArithmetic("exact"):
        found, total, soft = a @ b.T, a.sum(1), a[3].sum()

    assert bool(found[3].isnan().all())
    assert bool(found[:3].isfinite().all())
    assert bool(total[3].isnan()) and bool(total[4:].isfinite().all()) and bool(soft.isnan())


def test_zeros_and_numbers_near_the_smallest_are_products_too():
    tiny = torch.full((4, 8), 2.0**-126)
    with ExactArithmetic("exact"):
        assert torch.equal(torch.zeros(4, 8) @ torch.ones(8, 3), torch.zeros(4, 3))
        assert bool((tiny @ torch.ones(8, 3)).isfinite().all())
        assert torch.equal(torch.ones(4, 0) @ torch.ones(0, 3), torch.zeros(4, 3))


@pytest.mark.parametrize("shape", [(3, 1, 3), (64, 1, 64), (3, 2, 3), (1, 1, 1)])
def test_a_product_of_zeros_has_the_sign_of_no_library(shape):
    """With one term, MKL's product keeps -0.0, and its batches do not: equal numbers, and other bytes of a message."""
    rows, inner, columns = shape
    with ExactArithmetic("exact"):
        one = torch.zeros(rows, inner) @ -torch.ones(inner, columns)
        batch = torch.zeros(2, rows, inner) @ -torch.ones(2, inner, columns)
        total = torch.full((rows, inner), -0.0).sum(1)

    assert not any(bool(result.signbit().any()) for result in (one, batch, total))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.cumsum(0),
        lambda x: x.std(),
        lambda x: x.prod(),
        lambda x: torch.nn.functional.conv1d(x[None], x[None, :1].expand(3, -1, -1)[:, :1].expand(3, 4, 9)),
        lambda x: torch.nn.functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
        lambda x: torch.topk(x, 2),
    ],
    ids=["cumsum", "std", "prod", "conv1d", "sdpa", "topk"],
)
def test_an_operator_without_a_law_is_refused_by_its_name(call):
    with (
        ExactArithmetic("exact"),
        pytest.raises(ModelError, match=r'numerics = "exact": operator aten\.\S+ has no law'),
    ):
        call(torch.ones(4, 9))


def test_a_weight_is_rounded_once_until_it_changes(monkeypatch):
    rounded = []
    original = FixedPoint.round_rows.__func__
    monkeypatch.setattr(
        FixedPoint, "round_rows", classmethod(lambda cls, x, bits: rounded.append(x) or original(cls, x, bits))
    )
    weight = torch.nn.Parameter(operator_vectors.numbers("w", 30, 20))
    law, x = ExactArithmetic("exact", [weight]), operator_vectors.numbers("x", 5, 20)
    with law:
        first = torch.nn.functional.linear(x, weight)
        again = torch.nn.functional.linear(x, weight)
    assert len(rounded) == 3
    with torch.no_grad():
        weight.mul_(2.0)
    with law:
        changed = torch.nn.functional.linear(x, weight)

    assert len(rounded) == 5
    assert torch.equal(first, again)
    assert torch.equal(changed, first * 2)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("exp", -80, 80), ("log", 1e-30, 1e30), ("sin", -300, 300), ("cos", -300, 300), ("tanh", -9, 9), ("erf", -4, 4)],
)
def test_functions_are_those_of_float64_rounded(name, low, high):
    x = operator_vectors.numbers(name, 20_000, low=low, high=high)
    truth = getattr(torch, name)(x.double())

    found = getattr(functions, name)(x)

    assert float(((found - truth).abs() / truth.abs().clamp(min=1e-2)).max()) < 3e-6
    assert float(((found - truth).abs() / truth.abs().clamp(min=1.0)).max()) < 1.5e-7


def test_the_cosine_of_a_schedule_is_the_cosine():
    angles = [step * np.pi / 1000 for step in range(1001)]

    assert max(abs(rounded_cosine(angle) - np.cos(angle)) for angle in angles) < 2e-15
