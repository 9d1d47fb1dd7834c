"""A model in several processes of this machine, one a stage, with the face of transformers' whole model."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from phalanx.child import AskedProcess
from phalanx.errors import ModelError
from phalanx.models import ModelSource
from phalanx.models.hub_files import GENERATION
from phalanx.models.quiet import quiet_transformers
from phalanx.serve.stage_process import from_content, to_content

_MODULE = "phalanx.serve.stage_process"


class StageChain:
    """The processes of a model's stages, in a row. Each reads its own tensors alone, and ends with this one.

    Args:
        directory: The model, in the hub's layout.

    Raises:
        ModelError: The model has fewer layers, or a process cannot build its stage.
    """

    def __init__(self, directory: Path, num_stages: int) -> None:
        layers = ModelSource(directory).num_layers
        if not 1 <= num_stages <= layers:
            raise ModelError(f"--stages: found {num_stages}; {directory} has {layers} layers; give 1 to {layers}")
        self._processes: list[AskedProcess] = []
        self._logs = tempfile.TemporaryDirectory(prefix="phalanx-stages-")
        for index in range(num_stages):
            command = [_MODULE, str(directory), str(index), str(num_stages)]
            self._processes.append(AskedProcess(command, log=Path(self._logs.name) / f"stage-{index}.log"))
        for index in range(num_stages):
            self._ask(index, {})

    @property
    def process_ids(self) -> list[int]:
        """Of the stages, in order."""
        return [process.pid for process in self._processes]

    def extend_tokens(self, ids: Tensor, *, begins: bool) -> Tensor:
        """Run new tokens ``[1, new]`` through all stages; return the logits of the last one, ``[1, 1, vocab]``.

        Raises:
            ModelError: A stage has ended; its last words are in the message.
        """
        x = ids
        for index in range(len(self._processes)):
            x = from_content(self._ask(index, {"begins": begins}, to_content(x)))
        return x

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.close()
        self._logs.cleanup()

    def _ask(self, index: int, order: dict[str, Any], content: bytes = b"") -> bytes:
        try:
            return self._processes[index].ask(order, content)[1]
        except EOFError as exc:
            self.close()
            raise ModelError(f"stage {index} of the model: {exc}") from exc


def model_in_stages(directory: Path, line: StageChain) -> Any:
    """Return transformers' model without any weights, which asks stages for logits; it generates as the whole one."""
    hub_config = ModelSource(directory).hub_config
    with quiet_transformers(), torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(hub_config)
    if (directory / GENERATION).is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    # the stages keep keys and values, each its own
    model.generation_config.use_cache = False
    seen = torch.empty(1, 0, dtype=torch.int64)

    def forward(self: Any, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> CausalLMOutputWithPast:
        nonlocal seen
        num_seen = seen.shape[1]
        goes_on = 0 < num_seen < input_ids.shape[1] and torch.equal(input_ids[:, :num_seen], seen)
        new = input_ids[:, num_seen:] if goes_on else input_ids
        seen = input_ids.clone()
        return CausalLMOutputWithPast(logits=line.extend_tokens(new, begins=not goes_on))

    model_class = type(model)
    model.__class__ = type(model_class.__name__, (model_class,), {"forward": forward, "device": property(_on_host)})
    return model


def _on_host(_: Any) -> torch.device:
    return torch.device("cpu")
