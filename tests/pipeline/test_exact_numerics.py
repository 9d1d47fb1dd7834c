"""Exact numerics in a verified run: one law for all parties, no measurement of kernels, no tolerance."""

import pytest

from phalanx.pipeline import PipelineConfig
from phalanx.testing import tiny_run


def exact_run(numerics="exact", stages=4, **changes):
    run = tiny_run(num_layers=6, pipeline=PipelineConfig(stages=stages, step_timeout_s=30.0), **changes)
    return type(run)(**run.written | {"train": run.train.model_copy(update={"numerics": numerics})})


@pytest.mark.quick_cases("exact_fast")
@pytest.mark.parametrize("numerics", ["exact", "exact_fast"])
def test_an_honest_company_learns_the_same_bits_in_any_layout(make_company, numerics):
    digests = set()
    for stages in (3, 4):
        company = make_company(exact_run(numerics, stages))
        company.run(3)
        digests.add(company.weights_digest())
        assert company.verdicts == []

    assert len(digests) == 1
