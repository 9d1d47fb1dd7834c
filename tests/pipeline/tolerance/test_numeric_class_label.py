import pytest
import torch

from phalanx.pipeline import local_numeric_class
from phalanx.pipeline.tolerance.numeric_class import NumericClass

FIELDS = {"torch": "2.13.0", "device": "some CPU", "instructions": "AVX2", "threads": 1}


def test_one_process_is_always_in_the_same_class():
    assert local_numeric_class("cpu") == local_numeric_class("cpu")
    assert local_numeric_class("cpu").describe_difference(local_numeric_class("cpu")) == ""


def test_the_number_of_threads_decides():
    one = local_numeric_class("cpu")
    torch.set_num_threads(2)

    assert local_numeric_class("cpu").describe_difference(one) == "threads 2 instead of 1"


@pytest.mark.parametrize(
    "change", [{"torch": "2.13.1"}, {"device": "another CPU"}, {"instructions": "AVX512"}, {"threads": 2}]
)
def test_every_field_decides(change):
    known = set(NumericClass.model_fields)
    assert set(FIELDS) <= known, "a new field needs a line here"

    described = NumericClass(**(FIELDS | change)).describe_difference(NumericClass(**FIELDS))
    assert described == ", ".join(f"{name} {value} instead of {FIELDS[name]}" for name, value in change.items())


def test_a_class_says_what_it_is_of():
    mine = local_numeric_class("cpu")

    assert mine.torch == torch.__version__
    assert mine.threads == 1
    assert mine.device
