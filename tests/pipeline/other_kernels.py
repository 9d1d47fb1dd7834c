"""Another way to compute a stage, in the same process: attention without a fused kernel."""

from phalanx.pipeline import StageCopy


def eager(copy, held):
    """The same state and optimizer, in a module with an attention that is computed step by step."""
    del held
    other = copy.plan.model_copy(update={"attention": "eager"})
    found = StageCopy.of_module(copy.plan, copy.spec, StageCopy.build_empty(other, copy.spec.index).module)
    found.load_tensors(copy.state_tensors(), copy.step_count)
    return found
