"""A run in Python's hands: trained by one call, read as a mapping, shown as its report."""

import contextlib
import html
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from rich.console import Console

from phalanx.errors import ConfigError, InputError
from phalanx.telemetry import read_metrics
from phalanx.train import RunConfig, is_made, load_run

if TYPE_CHECKING:
    from phalanx.data.chat import ChatMessage
    from phalanx.serve import SamplingRule, TextModel
    from phalanx.train.sessions.cluster import OpenWorkers

_FRAME_HEIGHT = 640


class Run(dict[str, Any]):
    """A run directory, finished or not: a mapping of what ``summary.json`` holds, and empty while there is none.

    A notebook shows it as its report, in a frame that runs no script and loads nothing.
    """

    def __init__(self, directory: Path, summary: dict[str, Any]) -> None:
        super().__init__(summary)
        self.directory = directory

    @property
    def summary(self) -> dict[str, Any]:
        """What ``summary.json`` holds."""
        return dict(self)

    def metrics(self) -> list[dict[str, Any]]:
        """Return ``metrics.jsonl`` as it is now, a row a step."""
        path = self.directory / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []

    def columns(self) -> dict[str, list[Any]]:
        """Return the same figures by name, a value a step; None where a step has none."""
        rows = self.metrics()
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in names}

    def frame(self) -> Any:
        """Return the same figures as a frame of pandas."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as exc:
            raise ConfigError("frame() needs pandas; install it, or take metrics() or columns()") from exc
        return pandas.DataFrame(self.columns())

    def report(self) -> Path:
        """Write ``report.html`` anew, and return its path.

        Raises:
            InputError: The directory is gone, or cannot be written to.
        """
        from phalanx.report import write_report  # noqa: PLC0415 - it loads torch

        return write_report(self.directory)

    def _repr_html_(self) -> str | None:
        from phalanx.report import report_page  # noqa: PLC0415 - it loads torch

        try:
            page = report_page(self.directory)
        except InputError:
            return None
        name = html.escape(self.directory.name)
        return (
            f'<iframe title="Report of {name}" srcdoc="{html.escape(page)}" sandbox width="100%" '
            f'height="{_FRAME_HEIGHT}"></iframe>'
        )


def open_run(directory: str | Path) -> Run:
    """Open a run directory, whether the run is finished, broken off or under way.

    Raises:
        InputError: There is no run, or its summary cannot be read.
    """
    path = Path(directory)
    if not is_made(path):
        raise InputError(f"{path}: is no run directory; expected one that `phalanx train` or phalanx.train has made")
    file = path / "summary.json"
    try:
        summary = json.loads(file.read_bytes()) if file.exists() else {}
    except (OSError, ValueError) as exc:
        raise InputError(f"{file}: cannot be read ({exc}); a --resume writes it anew") from exc
    if not isinstance(summary, dict):
        raise InputError(f"{file}: found a {type(summary).__name__}, expected an object; a --resume writes it anew")
    return Run(path, summary)


def train(
    run: RunConfig | str | Path,
    run_dir: str | Path | None = None,
    *,
    resume: bool = False,
    from_step: int | None = None,
    from_run: str | Path | None = None,
    console: Console | None = None,
    open_workers: "OpenWorkers | None" = None,
) -> Run:
    """Train what a run file says, from a script, a notebook or a prompt; no main guard is needed.

    Args:
        run: A run file, or what `load_run` has read.
        run_dir: Where everything goes; ``runs/NAME`` when left out.
        resume: Go on from the last good checkpoint in `run_dir`; a run that is complete is left as it is.
        from_step: With `resume`: give up the checkpoints of later steps and go on from that of this one.
        from_run: Begin a new run where the one in this directory is.
        console: Where progress is shown; standard output when left out.
        open_workers: Starts local workers; for drills only, as `phalanx.lab.attacks.attackers_of` makes it.

    Returns:
        The run; a mapping of what ``summary.json`` holds. Ctrl-C, or the notebook's stop button, ends it with the
        status "interrupted".
    """
    from phalanx.train import train as train_run  # noqa: PLC0415 - torch is loaded when it is asked for

    summary = train_run(
        run if isinstance(run, RunConfig) else load_run(run),
        run_dir,
        resume=resume,
        from_step=from_step,
        from_run=from_run,
        console=console,
        open_workers=open_workers,
    )
    return Run(Path(summary["run_dir"]), summary)


def generate(
    where: "Run | TextModel | str | Path",
    prompt: str | Sequence[Mapping[str, str]],
    sampling: Mapping[str, Any] | None = None,
    *,
    own_code: bool = False,
    device: str = "cpu",
    stages: int = 1,
) -> str:
    """Let a model go on with a text, or answer in a chat, as `phalanx generate` does.

    Args:
        where: A run or its directory, a checkpoint in one, a directory in the hub's layout; or a `TextModel` that
            `phalanx.serve.open_text_model` has opened, on a device and in stages of its own, for many calls.
        prompt: A text; or the messages of a chat, each with ``role`` and ``content``.
        sampling: Fields of `phalanx.serve.SamplingRule`, for example ``{"max_new_tokens": 40, "temperature": 0.0}``.
        own_code: Code of the user's own that the run directory keeps may be run.
        stages: Into how many processes of this machine the layers are cut; they end when it has written.

    Returns:
        What the model wrote, without special tokens.

    Raises:
        ConfigError: `sampling` or a message has an unknown field, or a value that it cannot have.
    """
    from phalanx.data.chat import ChatMessage  # noqa: PLC0415 - it is needed here alone
    from phalanx.serve import SamplingRule, TextModel, open_text_model  # noqa: PLC0415 - they load torch

    try:
        rule = SamplingRule.model_validate(dict(sampling or {}))
        chat = None if isinstance(prompt, str) else [ChatMessage.model_validate(dict(message)) for message in prompt]
    except ValidationError as exc:
        first = exc.errors()[0]
        raise ConfigError(f"generate: {'.'.join(map(str, first['loc']))}: {first['msg']}") from exc
    if isinstance(where, TextModel):
        return _complete_text(where, prompt if isinstance(prompt, str) else chat or [], rule)
    path = where.directory if isinstance(where, Run) else Path(where)
    with contextlib.closing(open_text_model(path, own_code=own_code, device=device, stages=stages)) as model:
        return _complete_text(model, prompt if isinstance(prompt, str) else chat or [], rule)


def _complete_text(model: "TextModel", prompt: "str | list[ChatMessage]", rule: "SamplingRule") -> str:
    ids = model.encode_prompt(prompt) if isinstance(prompt, str) else model.chat_prompt(prompt)
    return model.complete_prompt(ids, rule).text
