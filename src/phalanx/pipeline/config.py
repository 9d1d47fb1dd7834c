"""The configuration of stages and guards in a run file, and of one worker in its own file."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from phalanx.config import StrictModel, one_of
from phalanx.config.strict import check_reference
from phalanx.pipeline.party_layout import PartyLayout
from phalanx.pipeline.presets import PRESETS, Preset, settled
from phalanx.pipeline.upkeep import UPKEEPS, Shadow, Upkeep
from phalanx.planner.schedules import verifiable_schedules
from phalanx.transport.config import TransportConfig

OWNER = "owner"

MOST_STAGES = 64


class PipelineConfig(StrictModel):
    """The cut of the model into stages, their workers, and the order in which microbatches run."""

    stages: int = Field(default=4, ge=1, le=MOST_STAGES)
    schedule: Annotated[str, one_of(verifiable_schedules)] = "1f1b"
    layers: tuple[int, ...] | None = None
    """Layers per stage; left out, layers are balanced by estimated cost."""
    spares: int = Field(default=0, ge=0, le=16)
    """Further local workers that hold nothing until a stage or a shadow is lost."""
    remote_workers: tuple[str, ...] = ()
    """Names of workers that join from other machines; left out, local workers are started."""
    may_join: tuple[str, ...] = ()
    """Names of further remote workers, which may come at any time and are not waited for."""
    respawns: int = Field(default=0, ge=0, le=1000)
    """How many local workers may be started anew in the place of such that are gone."""
    returns: int = Field(default=3, ge=0, le=1000)
    """How often a remote worker that was lost or has left may come back in one session of the owner, as a newcomer with
    the same certificate; a convicted one never does."""
    layout: PartyLayout | None = None
    """The processes of each local worker, and how they share its stages; left out, one. Remote ones have a file."""
    layouts: dict[str, PartyLayout] | None = None
    """Layouts of single local workers, by name, in the place of `layout`."""
    rebalance_every: int = Field(default=20, ge=0)
    """Steps over which the pace of every worker is measured; stages move away from one that is so slow that the step
    would be done in two thirds of the time or less. 0: they stay where they are."""
    pki: str | None = None
    """Directory of `phalanx pki`; left out, a throw-away authority is made in the run directory."""
    step_timeout_s: float = Field(default=300.0, gt=0)
    """Longest time that one step may take, recoveries included."""
    patience_s: float = Field(default=30.0, gt=0)
    """How long nothing may arrive in a guarded step before the owner asks which party is silent, hands on what was
    withheld, and at last replaces a party that does not answer; the longest silence of the last hundred honest steps
    counts four times, up to four times this."""
    transport: TransportConfig = TransportConfig()

    @model_validator(mode="after")
    def _check(self) -> "PipelineConfig":
        if self.layers is not None and len(self.layers) != self.stages:
            raise ValueError(f"layers has {len(self.layers)} entries for stages = {self.stages}; give one per stage")
        if self.remote_workers and self.pki is None:
            raise ValueError("remote_workers need pki = DIR, the directory that `phalanx pki` made")
        if self.may_join and not self.remote_workers:
            raise ValueError("may_join is for remote workers; name at least one in remote_workers, or set respawns")
        if self.respawns and self.remote_workers:
            raise ValueError("respawns is for local workers; name those that may come later in may_join")
        remote = (*self.remote_workers, *self.may_join)
        if len(set(remote)) != len(remote) or OWNER in remote:
            raise ValueError(f"remote_workers and may_join must be distinct names and none may be {OWNER!r}")
        return self

    @model_validator(mode="after")
    def _check_layouts(self) -> "PipelineConfig":
        if self.remote_workers and (self.layouts or self.layout):
            raise ValueError("layout and layouts are of local workers; a remote one's file has [parallel]")
        local = (*self.workers, *self.late_workers)
        stray = sorted(set(self.layouts or ()) - set(local))
        if stray:
            raise ValueError(f"layouts has {stray[0]!r}; this run's local workers are {', '.join(local)}")
        return self

    def layout_of(self, worker: str) -> PartyLayout:
        """How the ranks of a local worker share its stages."""
        return (self.layouts or {}).get(worker, self.layout or PartyLayout())

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of all workers, the stages' first ones first."""
        if self.remote_workers:
            return self.remote_workers
        return tuple(f"worker-{n}" for n in range(1, self._num_local + 1))

    @property
    def late_workers(self) -> tuple[str, ...]:
        """Names of workers that may join while the run is under way."""
        if self.remote_workers:
            return self.may_join
        return tuple(f"worker-{n}" for n in range(self._num_local + 1, self._num_local + self.respawns + 1))

    @property
    def _num_local(self) -> int:
        return max(self.stages - 2, 0) + self.spares


class GuardConfig(StrictModel):
    """The guard: what is checked, how often, and how a shadow stays fresh."""

    mode: Literal["phalanx", "paper", "statistics", "off"] = "phalanx"
    """`paper`: every message is recomputed by a copy that is kept in lock-step (Lu et al. 2023); `statistics`: moving
    averages alone condemn, nothing is recomputed; both are baselines, weaker or dearer than `phalanx`."""
    preset: Preset | None = None
    """What decides the rates, what is kept and the screen of gradients; "standard" where none of it is written out."""
    recovery: Literal["takeover", "restart", "skip_layer"] = "takeover"
    """After a verdict: exclude the guilty party; or, in mode `paper` only and as the paper does, exclude none and run
    the step again (`restart`), or run it without the suspect and its accuser and with three stages frozen."""
    audit_rate: float = Field(default=0.125, gt=0, le=1)
    """q: the share of each stage's microbatches that is recomputed before the optimizer steps."""
    step_audit_rate: float = Field(default=1 / 32, ge=0, le=1)
    """p: how often, per stage and step, all microbatches are recomputed together with the weight gradient."""
    owner_audit_rate: float = Field(default=1 / 64, ge=0, le=1)
    """How often, per stage and step, the owner itself redoes a stage's step: what colluding workers cannot bend."""
    third_party_audit_rate: float = Field(default=0.0, ge=0, le=1)
    """How often, per stage and step, a worker that neither holds nor shadows the stage redoes its step: takes load from
    the owner's own audits, but falls to a larger league. It fetches the stage's weights each time."""
    keep_steps: int = Field(default=0, ge=0, le=10_000)
    """How many steps a conviction can be followed back: the guilty party's stages are replayed, and the run goes back
    to the first step in which they were wrong. Every copy keeps two states and so many gradients for it."""
    keep_states: int = Field(default=0, ge=0, le=10_000)
    """Steps from one state that the owner keeps on its disk to the next; 0: none. After a conviction the run goes back
    to the last one before that certificate's first step that was not recomputed, and does all steps since again."""
    commit_lag: int = Field(default=0, ge=0, le=1)
    """How many steps the verdicts may be behind the optimizers. 1: the shadows' audits of a step run in the idle time
    of the next one, which waits for them before it is applied; every copy keeps what it takes to undo one step."""
    snapshot_every: int = Field(default=10, ge=1, le=10_000)
    """Steps from one snapshot to the next, with `shadow = "snapshot"`: so many at most are done again after a loss."""
    shadow: Shadow = "gradient"
    """`gradient`: the stage's gradient goes through the shadow's own optimizer; `lockstep`: the shadow recomputes
    everything; `adapters`: as `gradient`, with the promise that only adapters are trained, so that little moves;
    `update`: the stage sends its new weights, and the shadow can audit but not take over; `snapshot`: it is sent
    the state every `snapshot_every` steps, to which the run goes back when roles change, and weights when it audits."""
    screen: bool = True
    gradient_screen: bool = True
    """Whether a shadow that recomputes a microbatch compares its weight gradient with the sum that the stage sent; one
    that looks odd has the whole step recomputed. With `shadow` "gradient" or "adapters" alone."""
    classes: Literal["one", "mixed"] = "one"
    """`one`: every party computes the owner's bits, which is measured when it joins, and others are refused; `mixed`:
    others are let in, their messages and weight gradients are compared by distance, and all parties make updates in
    single roundings, so that states have equal bits on every processor."""
    tolerance: float = Field(default=1e-5, gt=0, lt=1)
    """tau between numeric classes (fp32): beyond it the referee decides. See `distance.py`."""

    @model_validator(mode="before")
    @classmethod
    def _settle_baseline(cls, found: Any) -> Any:
        """A preset fills in what is not written out; a baseline is what it is, and its rates are not for choice."""
        return settled(found) if isinstance(found, dict) else found

    @model_validator(mode="after")
    def _check_recovery(self) -> "GuardConfig":
        if self.recovery == "takeover":
            return self
        if self.mode != "paper":
            raise ValueError(f'recovery = "{self.recovery}" belongs to mode = "paper"; found mode = "{self.mode}"')
        if self.keep_steps:
            raise ValueError(
                f'recovery = "{self.recovery}" excludes no party, so keep_steps = {self.keep_steps} has no use; '
                "leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_upkeep(self) -> "GuardConfig":
        if self.keep_states and (self.keep_steps or self.recovery != "takeover" or not self.can_keep_states):
            raise ValueError(
                f"keep_states = {self.keep_states} with keep_steps = {self.keep_steps}, shadow = {self.shadow!r}, "
                f"mode = {self.mode!r}: states are kept in place of steps, by shadows that make their own updates; "
                "leave one out"
            )
        if self.verify_only and self.keep_steps:
            raise ValueError(
                f"shadow = {self.shadow!r} has no optimizer to go back with; leave out keep_steps or set "
                'shadow = "gradient"'
            )
        return self

    @model_validator(mode="after")
    def _check_classes(self) -> "GuardConfig":
        if self.classes == "mixed" and self.enabled and not self.sends_gradient:
            raise ValueError(
                f'classes = "mixed" with shadow = "{self.shadow}": only a shadow that is sent the weight gradient and '
                'makes its own updates keeps equal bits where kernels differ; use "gradient", or classes = "one"'
            )
        return self

    @model_validator(mode="after")
    def _check_lag(self) -> "GuardConfig":
        if self.commit_lag and self.mode != "phalanx":
            raise ValueError(
                f'commit_lag = {self.commit_lag} with mode = "{self.mode}": only mode = "phalanx" can undo a step that '
                "was applied before its audits; set commit_lag = 0"
            )
        if self.commit_lag and not self.sends_gradient:
            raise ValueError(
                f'commit_lag = {self.commit_lag} with shadow = "{self.shadow}": only a shadow that makes its own '
                'updates can stay a step behind; set commit_lag = 0 or shadow = "gradient"'
            )
        return self

    @model_validator(mode="after")
    def _check_snapshots(self) -> "GuardConfig":
        if self.upkeep.sends == "state" and self.keep_steps:
            raise ValueError(
                f'keep_steps = {self.keep_steps} with shadow = "snapshot": the run goes back to its last snapshot '
                'and keeps no updates; leave out keep_steps, or set shadow = "gradient"'
            )
        every = type(self).model_fields["snapshot_every"].default
        if self.upkeep.sends != "state" and self.snapshot_every != every:
            raise ValueError(
                f"snapshot_every = {self.snapshot_every} with shadow = {self.shadow!r}, which takes no snapshots; "
                'leave it out or set shadow = "snapshot"'
            )
        return self

    @property
    def preset_in_force(self) -> Preset | None:
        """The preset with values that all hold; what an upkeep cannot keep does not count."""
        if self.mode != "phalanx":
            return None
        needless = set() if self.can_keep_states and not self.keep_steps else {"keep_states"}
        own = self.model_dump(include=set(PRESETS["standard"]) - needless)
        return next((name for name, values in PRESETS.items() if own.items() <= values.items()), None)

    @property
    def preset_values(self) -> dict[str, Any]:
        """What the preset that is named says; nothing where none is."""
        return {} if self.preset is None else dict(PRESETS[self.preset])

    @property
    def upkeep(self) -> Upkeep:
        """How a shadow stays fresh."""
        return UPKEEPS[self.shadow]

    @property
    def can_keep_states(self) -> bool:
        """Whether both copies of a stage make its updates, so that both can go back."""
        return self.mode == "phalanx" and self.upkeep.makes_updates

    @property
    def undoable_steps(self) -> int:
        """How many applied steps every party can undo."""
        return max(self.keep_steps, self.commit_lag)

    @property
    def undoes_last_step(self) -> bool:
        """Whether every copy can go back over its last update: an update that one party alone has seen is undone."""
        return self.enabled and self.upkeep.makes_updates

    @property
    def verify_only(self) -> bool:
        """Whether a shadow has weights and no moments: it can audit its stage, and never serve it."""
        return self.upkeep.sends == "weights"

    @property
    def keeps_snapshots(self) -> bool:
        """Whether a shadow has a state of every so many steps and nothing between, and all go back to it together."""
        return self.enabled and self.upkeep.sends == "state"

    @property
    def one_optimizer(self) -> bool:
        """Whether the holder alone makes the updates of a stage: no other party has its gradient or its moments."""
        return self.verify_only or self.keeps_snapshots

    def hands_on(self, step: int) -> bool:
        """Whether a holder sends its shadow what its stage is after so many optimizer steps."""
        return self.verify_only or (self.keeps_snapshots and step % self.snapshot_every == 0)

    @property
    def sends_gradient(self) -> bool:
        """Whether the other copy of a stage gets its weight gradient before the commit."""
        return self.upkeep.sends == "gradient"

    @property
    def screens_gradients(self) -> bool:
        """Whether a shadow looks at the weight gradient that it was sent with one of its own in hand."""
        return self.gradient_screen and self.mode == "phalanx" and self.sends_gradient

    @property
    def audits(self) -> bool:
        """Whether anything is ever recomputed."""
        return self.mode in ("phalanx", "paper")

    @property
    def enabled(self) -> bool:
        """Whether anything is guarded at all."""
        return self.mode != "off"


class AttackConfig(StrictModel):
    """A party that lies, for drills and tests; `kind` is a name in `phalanx.lab.attacks.ATTACKS`."""

    kind: str = "none"
    stages: tuple[int, ...] = (1,)
    direction: Literal["forward", "backward", "both"] | None = None
    """Which messages are lies; left out, the attack's own choice. An attack on anything else refuses one."""
    strength: float | None = Field(default=None, allow_inf_nan=False)
    """How large the lie is, in the attack's own measure; left out, its default. An attack without one refuses it."""
    rate: float = Field(default=1.0, ge=0, le=1)
    from_step: int = Field(default=0, ge=0)
    until_step: int | None = None
    seed: int = 0
    model: str | None = None
    """Directory of the public model that the attacker has; for `rehearsed_backdoor`, any other attack refuses one."""
    also: tuple["AttackConfig", ...] = ()
    """Further attackers in the same run, each with a kind and stages of its own."""

    @model_validator(mode="after")
    def _check_attackers(self) -> "AttackConfig":
        if not self.also:
            return self
        together = (self, *self.also)
        if any(one.kind == "none" for one in together) or any(one.also for one in self.also):
            raise ValueError('of several attacks each has a kind other than "none", and only the first one has also')
        stages = [stage for one in together for stage in one.stages]
        twice = sorted({stage for stage in stages if stages.count(stage) > 1})
        if twice:
            raise ValueError(
                f"stages {twice} are in two attacks: a party lies in one way; give each stage to one of them"
            )
        return self

    @property
    def attackers(self) -> tuple["AttackConfig", ...]:
        """One for each way of lying; none where no party lies."""
        return () if self.kind == "none" else (self, *self.also)


_ATTACK_KEYS = {"attack", "attack_log"}
_OLD_TP = "tensor_parallel"


class WorkerCode(StrictModel):
    """Code that a worker's own file names."""

    kind: Annotated[str, AfterValidator(check_reference)]


class WorkerConfig(StrictModel):
    """The config of one worker process: its identity, and where its owner listens."""

    identity: str
    """Directory with this worker's certificate and keys."""
    owner: str
    """`host:port` of the owner."""
    owner_name: str = OWNER
    advertise: str | None = None
    """Host name or address under which other parties reach this worker; left out, the one it binds to."""
    run_digest: str | None = None
    """When given, any other run config is refused."""
    join_timeout_s: float = Field(default=300.0, gt=0, le=86400, allow_inf_nan=False)
    """How long to look for an owner that does not listen yet, seconds."""
    threads: int = Field(default=1, ge=1)
    parallel: PartyLayout = PartyLayout()
    """Processes of this machine that share this worker's stages, this one included."""
    device: str = "cpu"
    memory_mib: int | None = Field(default=None, ge=1, le=2**40)
    """Memory that this worker gives to stages; left out, most of what is available on its machine when it joins."""
    journal: str | Literal[False] | None = None
    """Directory in which the last states of this worker's stages are kept (`checkpoint.journal`); left out, `state` in
    the directory of `identity` where `device` is "cpu". false: none are kept."""
    code: Annotated[tuple[WorkerCode, ...], Field(strict=False)] = ()
    """Model families that this worker runs although they are not in the package; no owner can have any loaded."""
    code_home: str | None = None
    """Directory of the files of `code`; left out, that of this file."""
    log_heads: str | None = None
    """Directory for the newest head of each run's audit log; left out, `log_heads` in the directory of `identity`."""
    transport: TransportConfig = TransportConfig()

    @model_validator(mode="after")
    def _check_code(self) -> "WorkerConfig":
        if self.code and self.parallel.world > 1:
            raise ValueError("code is for a worker of one process: it is not tried with ranks; leave parallel out")
        return self

    @field_validator("owner")
    @classmethod
    def _check_address(cls, address: str) -> str:
        host, _, port = address.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
            raise ValueError(f"found {address[:100]!r}, expected host:port, such as owner.example.org:7070")
        return address

    @model_validator(mode="before")
    @classmethod
    def _refuse_attack(cls, data: object) -> object:
        if isinstance(data, dict) and not _ATTACK_KEYS.isdisjoint(data):
            raise ValueError(
                "has an attack, and a worker cannot be told to attack; remove it: `phalanx train` and `phalanx attack` "
                "start attackers of this machine from [attack] of the run file, and on another machine the laboratory "
                "does: `python -m phalanx.lab.attacks.worker ATTACK.toml WORKER.toml`"
            )
        return data

    @model_validator(mode="before")
    @classmethod
    def _read_tensor_parallel(cls, data: object) -> object:
        """`tensor_parallel = N` is the older way to write `parallel = { tp = N }`."""
        if not isinstance(data, dict) or _OLD_TP not in data:
            return data
        if "parallel" in data:
            raise ValueError(f"{_OLD_TP} and [parallel] both say how ranks share a stage; put tp into [parallel]")
        return {**{key: value for key, value in data.items() if key != _OLD_TP}, "parallel": {"tp": data[_OLD_TP]}}
