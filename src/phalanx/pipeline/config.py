"""The configuration of stages and guards in a run file, and of one worker in its own file."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    field_validator,
    model_serializer,
    model_validator,
)

from phalanx.config import RefusedKeyError, StrictModel, one_of
from phalanx.config.strict import check_reference, later_key
from phalanx.pipeline.party_layout import PartyLayout
from phalanx.planner.schedules import verifiable_schedules
from phalanx.transport.config import TransportConfig

OWNER = "owner"

MAX_STAGES = 64


class PipelineConfig(StrictModel):
    """The cut of the model into stages, their workers, and the order in which microbatches run."""

    stages: int = Field(default=4, ge=1, le=MAX_STAGES)
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
    def _check_section(self) -> "PipelineConfig":
        if self.layers is not None and len(self.layers) != self.stages:
            raise ValueError(f"layers has {len(self.layers)} entries for stages = {self.stages}; give one per stage")
        if self.remote_workers and self.pki is None:
            raise RefusedKeyError(
                "remote_workers need pki = DIR, the directory that `phalanx pki` made",
                key="pipeline.pki",
                found="nothing",
                expected="the directory that `phalanx pki` made",
                do="make one with `phalanx pki init DIR`, and add pki = DIR",
            )
        if self.may_join and not self.remote_workers:
            raise ValueError("may_join requires remote workers; name at least one in remote_workers, or set respawns")
        if self.respawns and self.remote_workers:
            raise ValueError("respawns requires local workers; name the workers that may join later in may_join")
        remote = (*self.remote_workers, *self.may_join)
        if len(set(remote)) != len(remote) or OWNER in remote:
            raise ValueError(f"remote_workers and may_join must be distinct names and none may be {OWNER!r}")
        return self

    @model_validator(mode="after")
    def _check_layouts(self) -> "PipelineConfig":
        if self.remote_workers and (self.layouts or self.layout):
            raise ValueError("layout and layouts apply to local workers; the file of a remote worker has [parallel]")
        local = (*self.worker_names, *self.late_workers)
        stray = sorted(set(self.layouts or ()) - set(local))
        if stray:
            raise ValueError(f"layouts has {stray[0]!r}; this run's local workers are {', '.join(local)}")
        return self

    def layout_of(self, worker: str) -> PartyLayout:
        """How the ranks of a local worker share its stages."""
        return (self.layouts or {}).get(worker, self.layout or PartyLayout())

    @property
    def worker_names(self) -> tuple[str, ...]:
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


Shadow = Literal["gradient", "lockstep", "adapters"]


@dataclass(frozen=True)
class Upkeep:
    """One way to keep a shadow like its stage.

    Attributes:
        bytes_sent: Bytes per trained parameter and step that a stage sends its shadow, in fp32: its weight gradient.
        in_lockstep: Whether the shadow recomputes every microbatch of every step, the weight gradient included.
        adapters_only: Whether it promises that nothing but adapters is trained.
    """

    bytes_sent: int
    in_lockstep: bool = False
    adapters_only: bool = False


UPKEEPS: Mapping[str, Upkeep] = {
    "gradient": Upkeep(4),
    "lockstep": Upkeep(0, in_lockstep=True),
    "adapters": Upkeep(4, adapters_only=True),
}
"""By the value of ``guard.shadow``; a further one is a line here, and a word of `Shadow`."""

Preset = Literal["economy", "light", "standard", "strict"]

PRESETS: Mapping[Preset, Mapping[str, Any]] = {
    "economy": {
        "audit_rate": 1 / 64,
        "min_audits": 0,
        "step_audit_rate": 1 / 256,
        "owner_audit_rate": 1 / 256,
        "keep_states": 1792,
        "gradient_screen": False,
    },
    "light": {
        "audit_rate": 1 / 16,
        "step_audit_rate": 1 / 64,
        "owner_audit_rate": 1 / 128,
        "keep_states": 896,
        "gradient_screen": False,
    },
    "standard": {
        "audit_rate": 1 / 8,
        "step_audit_rate": 1 / 64,
        "owner_audit_rate": 1 / 32,
        "keep_states": 224,
        "gradient_screen": True,
    },
    "strict": {
        "audit_rate": 1 / 4,
        "step_audit_rate": 1 / 16,
        "owner_audit_rate": 1 / 8,
        "keep_states": 56,
        "gradient_screen": True,
    },
}
"""`keep_states` is at least as many steps as it takes to find a league with 99.9 % (a test says so)."""


def _values_of(preset: Preset | None) -> dict[str, Any]:
    """Return all values of a preset; `min_audits` came later than the presets that do not name it."""
    return {} if preset is None else {"min_audits": 1, **PRESETS[preset]}


_REMOVED_KEYS: Mapping[str, tuple[Any, str]] = {
    "keep_steps": (0, "set guard.keep_states, or guard.preset, which sets it"),
    "third_party_audit_rate": (0.0, "raise guard.owner_audit_rate: the owner's own audits detect colluding parties"),
    "recovery": ("takeover", "remove it; `phalanx reproduce` has the recoveries of the paper"),
    "snapshot_every": (10, "remove it"),
}
"""Keys that are gone, each with its only value left and what to do about another one (ADR 219 and 220)."""

_REMOVED_VALUES: Mapping[tuple[str, object], str] = {
    ("shadow", "update"): 'set shadow = "gradient", which sends as much and can take over',
    ("shadow", "snapshot"): 'set shadow = "gradient"',
    ("mode", "paper"): 'set shadow = "lockstep", which also recomputes everything, with rates of 0',
    ("mode", "statistics"): "remove it; `phalanx reproduce` has statistics alone as a baseline",
}


def _without_removed(section: Mapping[str, Any]) -> dict[str, Any]:
    """Drop removed keys that have their only value left, as run directories have them."""
    for key, (only, instead) in _REMOVED_KEYS.items():
        if section.get(key, only) != only:
            raise _removed_key_error(key, section[key], instead)
    for (key, value), instead in _REMOVED_VALUES.items():
        if section.get(key) == value:
            raise _removed_key_error(key, value, instead)
    return {key: value for key, value in section.items() if key not in _REMOVED_KEYS}


def _removed_key_error(key: str, value: object, instead: str) -> RefusedKeyError:
    written = json.dumps(value, default=str)
    return RefusedKeyError(
        f"{key} = {written} was removed; {instead}",
        key=f"guard.{key}",
        found=written,
        expected="no such key",
        do=instead,
    )


def with_standard_preset(section: Mapping[str, Any]) -> dict[str, Any]:
    """Add the preset ``standard`` to the ``[guard]`` of a run file that names none and leaves a key of a preset out.

    A config that a run directory holds has every key written out, so it means what it meant when it was written.
    """
    is_open = section.get("mode", "phalanx") == "phalanx" and not PRESETS["standard"].keys() <= section.keys()
    return {"preset": "standard", **section} if is_open else dict(section)


def _with_preset(section: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in what a preset decides and the run file does not say.

    A key that is written out wins over a preset that is named. Where keys are written out and no preset is named,
    there is none, and what is left out has its plain default.
    """
    named = section.get("preset", None if PRESETS["standard"].keys() & section.keys() else "standard")
    if section.get("mode", "phalanx") == "off" or named is None:
        return {**section, "preset": None}
    return {"preset": named, **PRESETS.get(named, {}), **section}


class GuardConfig(StrictModel):
    """The guard: its checks, their rates, and the upkeep of shadows."""

    mode: Literal["phalanx", "off"] = "phalanx"
    preset: Preset | None = None
    """What decides the rates, what is kept and the screen of gradients; "standard" where none of it is written out."""
    audit_rate: float = Field(default=0.125, gt=0, le=1)
    """q: the share of each stage's microbatches that is recomputed before the optimizer steps."""
    min_audits: int = Field(default=1, ge=0, le=1)
    """How many microbatches of each stage a step has recomputed at least. 0: with M microbatches and q M below 1, one
    microbatch in that share of the steps, and none in the others."""
    step_audit_rate: float = Field(default=1 / 32, ge=0, le=1)
    """p: how often, per stage and step, all microbatches are recomputed together with the weight gradient."""
    owner_audit_rate: float = Field(default=1 / 64, ge=0, le=1)
    """How often, per stage and step, the owner itself redoes a stage's step: what colluding workers cannot bend."""
    keep_states: int = Field(default=0, ge=0, le=10_000)
    """Steps from one state that the owner keeps on its disk to the next; 0: none. After a conviction the run goes back
    to the last one before that certificate's first step that was not recomputed, and does all steps since again."""
    commit_lag: int = Field(default=0, ge=0, le=1)
    """How many steps the verdicts may be behind the optimizers. 1: the shadows' audits of a step run in the idle time
    of the next one, which waits for them before it is applied; every copy keeps what it takes to undo one step."""
    shadow: Shadow = "gradient"
    """`gradient`: the stage's gradient goes through the shadow's own optimizer; `lockstep`: the shadow recomputes
    everything; `adapters`: as `gradient`, with the promise that only adapters are trained, so that little moves."""
    shadows: int = later_key(1, ge=1, le=2)
    """Copies of each stage besides its holder's. 2: a second shadow makes and signs every update and audits nothing, so
    that holder and shadow may be lost at once; one more gradient is sent, one more copy kept."""
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
    def _apply_preset(cls, section: Any) -> Any:
        return _with_preset(_without_removed(section)) if isinstance(section, dict) else section

    @model_validator(mode="after")
    def _check_guard(self) -> "GuardConfig":
        if self.keep_states and not self.is_enabled:
            raise ValueError(f'keep_states = {self.keep_states} with mode = "off", which undoes nothing; remove one')
        if self.shadows > 1 and not (self.is_enabled and self.sends_gradient):
            raise ValueError(
                f'shadows = {self.shadows} with mode = "{self.mode}" and shadow = "{self.shadow}": a second shadow '
                'lives on the gradient that is sent to it; set shadow = "gradient", or shadows = 1'
            )
        if self.classes == "mixed" and self.is_enabled and not self.sends_gradient:
            raise ValueError(
                f'classes = "mixed" with shadow = "{self.shadow}": different kernels need a shadow that receives '
                'the weight gradient and makes its own updates; use "gradient", or classes = "one"'
            )
        if self.commit_lag and not self.is_enabled:
            raise ValueError(
                f'commit_lag = {self.commit_lag} with mode = "off": only mode = "phalanx" can undo a step that '
                "was applied before its audits; set commit_lag = 0"
            )
        if self.commit_lag and not self.sends_gradient:
            raise ValueError(
                f'commit_lag = {self.commit_lag} with shadow = "{self.shadow}": a lock-step shadow cannot lag one '
                'step; set commit_lag = 0 or shadow = "gradient"'
            )
        return self

    @model_serializer(mode="wrap")
    def _with_removed(self, write: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Write removed keys with their only value: run digests and audit logs are as they were before.

        A new key is left out where it says what was so before it.
        """
        values = write(self)
        if self.min_audits == _values_of(self.preset).get("min_audits", 1) == 1:
            values.pop("min_audits", None)
        return {**values, **{key: only for key, (only, _) in _REMOVED_KEYS.items()}}

    @property
    def preset_in_force(self) -> Preset | None:
        """The preset with values that all hold."""
        if not self.is_enabled:
            return None
        holds = (name for name in PRESETS if all(getattr(self, k) == v for k, v in _values_of(name).items()))
        return next(holds, None)

    @property
    def preset_values(self) -> dict[str, Any]:
        """What the preset that is named says; nothing where none is."""
        return _values_of(self.preset)

    @property
    def shadow_upkeep(self) -> Upkeep:
        """How a shadow stays fresh."""
        return UPKEEPS[self.shadow]

    @property
    def sends_gradient(self) -> bool:
        """Whether the other copy of a stage gets its weight gradient before the commit."""
        return not self.shadow_upkeep.in_lockstep

    @property
    def screens_gradients(self) -> bool:
        """Whether a shadow looks at the weight gradient that it was sent with one of its own in hand."""
        return self.gradient_screen and self.is_enabled and self.sends_gradient

    @property
    def is_enabled(self) -> bool:
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
        if any(attacker.kind == "none" for attacker in together) or any(attacker.also for attacker in self.also):
            raise ValueError(
                'with several attacks each needs a kind other than "none", and only the first one may have also'
            )
        stages = [stage for attacker in together for stage in attacker.stages]
        twice = sorted({stage for stage in stages if stages.count(stage) > 1})
        if twice:
            raise ValueError(f"stages {twice} are in two attacks; assign each stage to one attack")
        return self

    @property
    def single_attacks(self) -> tuple["AttackConfig", ...]:
        """One for each way of lying; none where no party lies."""
        return () if self.kind == "none" else (self, *self.also)


_ATTACK_KEYS = {"attack", "attack_log"}


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
        if self.code and self.parallel.num_ranks > 1:
            raise ValueError("code needs a worker of one process; remove parallel")
        return self

    @field_validator("owner")
    @classmethod
    def _check_address(cls, address: str) -> str:
        host, _, port = address.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
            raise RefusedKeyError(
                f"found {address[:100]!r}, expected host:port, such as owner.example.org:7070",
                key="owner",
                found=address[:100],
                expected="host:port",
                do="write host:port, such as owner.example.org:7070",
            )
        return address

    @model_validator(mode="before")
    @classmethod
    def _refuse_attack(cls, data: object) -> object:
        if isinstance(data, dict) and not _ATTACK_KEYS.isdisjoint(data):
            raise ValueError(
                "attack is not a key of worker files; remove it: `phalanx train` and `phalanx attack` start local "
                "attackers from [attack] of the run file; on another machine use the laboratory: `python -m "
                "phalanx.lab.attacks.worker ATTACK.toml WORKER.toml`"
            )
        return data
