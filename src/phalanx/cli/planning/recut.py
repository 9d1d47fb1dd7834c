"""``phalanx train --recut``: a run has as many stages as it has workers, from one session to the next."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cli.console import print_line
from phalanx.cli.forking import worker_opener
from phalanx.cli.planning.stages import find_present, measure_stages
from phalanx.errors import ConfigError, InputError, PhalanxError
from phalanx.telemetry import PEERS_FILE
from phalanx.telemetry.parties import read_peers

if TYPE_CHECKING:
    from phalanx.train import PipelineRun, RunConfig

LASTING_STEPS = 20
"""For so many steps a run has had other workers before its layers are cut for them."""
CUT_SHARE = 0.1
"""Largest share of the time that goes into cuts, however often a worker comes and goes."""

_CUT_KEYS = ("stages", "layers", "spares", "respawns", "remote_workers", "may_join")
_OUT_FOR_GOOD = ("evicted", "revoked")


class StageCutter:
    """Ends a session where its workers have come or gone for good, and says with which stages the next one begins.

    Attributes:
        run: Run of the present session, or of the next one after a cut.
    """

    def __init__(self, run: "RunConfig", run_dir: Path) -> None:
        self.run = _check_run(run)
        self._run_dir = run_dir
        self._workers: list[str] = []
        self._changed_at = 0
        self._cut_s = 0.0
        self._last_cut: float | None = None
        self._refused_counts: set[int] = set()

    def train_sessions(self, *, resume: bool, from_step: int | None, from_run: Path | None) -> dict[str, Any]:
        """Train in as many sessions as there are cuts; return the last one's summary.

        The options go to `phalanx.train.train` for the first session.
        """
        from phalanx.train import train

        if resume:
            self._keep_cut()
        earlier_run: PipelineRun | None = None
        while True:
            session_run, size = self.run, self._measure_metrics()
            try:
                summary = train(
                    session_run,
                    self._run_dir,
                    resume=resume,
                    from_step=from_step,
                    from_run=from_run,
                    open_workers=worker_opener(session_run),
                    on_validation=lambda num_steps, _: self.check_workers(num_steps),
                )
            except PhalanxError as exc:
                if earlier_run is None or self._measure_metrics() > size:
                    raise
                # a stage may be too large for the memory that a worker offers
                self._refused_counts.add(session_run.pipeline.stages - 2)
                print_line(f"{exc}; the run goes on with {earlier_run.pipeline.stages} stages, as before")
                self.run, earlier_run = earlier_run, None
            else:
                if self.run is session_run:
                    return summary
                earlier_run = session_run
            resume, from_step, from_run = True, None, None

    def _keep_cut(self) -> None:
        """Have the stages that the run has had, whatever stages the run file begins with."""
        from phalanx.train import PipelineRun, load_run

        saved = load_run(self._run_dir / "config.toml")
        if isinstance(saved, PipelineRun):
            self._change_pipeline({key: getattr(saved.pipeline, key) for key in _CUT_KEYS})

    def check_workers(self, num_steps: int) -> None:
        """End the session where another number of workers has lasted, and stages for them are not slower.

        Raises:
            KeyboardInterrupt: The session ends as by Ctrl-C; `run` is how it goes on.
        """
        try:
            self._cut_where_faster(num_steps)
        except (ConfigError, InputError) as exc:
            # a run goes on as it is where its own records say too little
            print_line(f"the layers stay as they are: {exc}")

    def _cut_where_faster(self, num_steps: int) -> None:
        pipeline, now = self.run.pipeline, time.monotonic()
        if self._last_cut is not None and not self._cut_s:
            self._cut_s = now - self._last_cut
        workers = [row.name for row in find_present(self._run_dir)]
        num_middle = pipeline.stages - 2
        if not workers or num_middle <= len(workers) <= num_middle + pipeline.spares:
            self._workers = []
            return
        if workers != self._workers:
            self._workers, self._changed_at = workers, num_steps
        lasts = num_steps - self._changed_at >= LASTING_STEPS
        is_soon = self._last_cut is not None and now - self._last_cut < self._cut_s / CUT_SHARE
        if not lasts or is_soon or len(workers) in self._refused_counts or num_steps >= self.run.train.steps:
            return
        proposal = measure_stages(self.run, self._run_dir)
        if proposal is None or proposal.slowest_then_s > proposal.slowest_now_s:
            return
        layers = proposal.layers
        self._change_pipeline({"stages": len(layers), "layers": layers, **self._name_workers(workers)})
        self._workers, self._last_cut, self._cut_s = [], now, 0.0
        raise KeyboardInterrupt(
            f"{len(workers)} workers for {num_middle} stages since step {self._changed_at}: the layers are cut anew "
            f"after step {num_steps}, from {pipeline.stages} stages into {len(layers)}"
        )

    def _measure_metrics(self) -> int:
        """Return the size of what finished steps have left behind."""
        path = self._run_dir / "metrics.jsonl"
        return path.stat().st_size if path.exists() else 0

    def _name_workers(self, present: list[str]) -> dict[str, Any]:
        """Return the keys of `[pipeline]` that give each middle stage a worker."""
        pipeline = self.run.pipeline
        status = read_peers(self._run_dir / PEERS_FILE)
        out = {row.name for row in (status.parties if status else ()) if row.state in _OUT_FOR_GOOD}
        if pipeline.remote_workers:
            others = [name for name in (*pipeline.remote_workers, *pipeline.may_join) if name not in present]
            return {"remote_workers": tuple(present), "may_join": tuple(name for name in others if name not in out)}
        # local workers are started anew under the first names; convicted ones are left out of them
        spares = 0
        while len({f"worker-{n}" for n in range(1, len(present) + spares + 1)} - out) < len(present):
            spares += 1
        return {"spares": spares}

    def _change_pipeline(self, keys: Mapping[str, Any]) -> None:
        # another object even where nothing changes: sessions are told apart by it
        pipeline = self.run.pipeline.model_copy(update=dict(keys))
        self.run = self.run.model_copy(update={"pipeline": pipeline})


def _check_run(run: "RunConfig") -> "PipelineRun":
    from phalanx.train import PipelineRun

    lacking = (
        "a run with [pipeline]"
        if not isinstance(run, PipelineRun)
        else "no [privacy], whose noise is drawn by stage"
        if run.privacy is not None
        else "no pipeline.layouts, which name workers"
        if run.pipeline.layouts
        else "train.validate_every, for stages are cut after a validation"
        if not run.train.validate_every
        else None
    )
    if lacking is not None or not isinstance(run, PipelineRun):
        raise ConfigError(f"train: --recut expects {lacking}; change the run file or remove --recut").with_facts(
            code="PHX-C002", key="--recut", expected=lacking or "", do="remove --recut"
        )
    return run
