"""What thousands of companies in one process may share: modules of stages, opened models, measurements of kernels."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from phalanx.models import StageModule
from phalanx.pipeline.membership import admission
from phalanx.pipeline.stage import stage_copy
from phalanx.pipeline.worker import process
from phalanx.testing import company
from phalanx.train.setup import stage_source


class SharedParts:
    """Parts of companies that are played one after another in this process.

    A module is given to one copy of a stage at a time, with the values that a new one has. Nothing of a message, a
    signature, a judge or a file is shared.
    """

    def __init__(self) -> None:
        self._makers = {"empty": stage_copy.build_empty_stage, "filled": stage_source.build_stage}
        self._free: dict[str, list[StageModule]] = {}
        self._in_use: list[tuple[str, StageModule]] = []
        self._values: dict[str, dict[str, torch.Tensor]] = {}
        self._results: dict[Any, Any] = {}

    def take_back(self) -> None:
        """Take all modules back: no party of an earlier company computes any more."""
        for key, module in self._in_use:
            self._free.setdefault(key, []).append(module)
        self._in_use = []

    @contextlib.contextmanager
    def put_in_place(self) -> Iterator[None]:
        """Let companies use the shared parts."""
        with contextlib.ExitStack() as stack:
            for owner, name, value in (
                (stage_copy, "build_empty_stage", self._build_empty),
                (stage_source, "build_stage", self._build_filled),
                (company, "open_model", self._remember(company.open_model)),
                (admission, "secrets", SimpleNamespace(token_hex=lambda size: "5a" * size)),
                (admission, "fingerprint_kernels", self._remember(admission.fingerprint_kernels)),
                (process, "fingerprint_kernels", self._remember(process.fingerprint_kernels)),
            ):
                stack.enter_context(patch.object(owner, name, value))
            yield

    def _remember(self, function: Any) -> Any:
        def call(*args: Any) -> Any:
            key = (function.__name__, repr(args))
            if key not in self._results:
                self._results[key] = function(*args)
            return self._results[key]

        return call

    def _build_empty(self, hub_config: Any, spec: Any, **kwargs: Any) -> StageModule:
        return self._take_module("empty", (hub_config, spec), kwargs)

    def _build_filled(self, source: Any, spec: Any, **kwargs: Any) -> StageModule:
        return self._take_module("filled", (source, spec), kwargs)

    def _take_module(self, sort: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StageModule:
        key = f"{sort} {args[0] if sort == 'empty' else args[0].directory} {args[1]} {sorted(kwargs.items())}"
        if self._free.get(key):
            module = self._free[key].pop()
            values = self._values[key]
            with torch.no_grad():
                for name, parameter in module.all_parameters().items():
                    parameter.copy_(values[name])
                    parameter.grad = None
        else:
            module = self._makers[sort](*args, **kwargs)
            if module.ties_head and (module.spec.is_last or module.spec.has_embedding):
                # its head may become another module's embedding
                return module
            parameters = module.all_parameters()
            self._values.setdefault(key, {name: each.detach().clone() for name, each in parameters.items()})
            module.all_parameters = lambda: dict(parameters)
        self._in_use.append((key, module))
        return module
