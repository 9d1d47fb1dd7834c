"""The plan of a drill: which attacks it runs, from its options and from the run file's own section."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.config import dump_toml, is_own, open_own_code, parse_override, pin_reference
from phalanx.errors import ConfigError
from phalanx.lab.attacks import AttackPlan, check_attack, load_attack, make_attack
from phalanx.pipeline import AttackConfig
from phalanx.pipeline.assignment.assignment import first_assignment
from phalanx.train import RunConfig, StagedRun
from phalanx.train.runs.support import section_fault

_HONEST = "with `phalanx join TOKEN --stay`, which serves run after run, or anew with `phalanx worker`"
DEFAULT_KINDS = ("forward_sign_flip", "backward_gaussian")


@dataclass(frozen=True)
class Drill:
    """The options of a drill; an option that is left out has the value in ``[attack]``, or else its default.

    Attributes:
        kinds: Names in `ATTACKS`, each for a run of its own; None for what ``[attack]`` has, or the paper's two.
        together: Attackers of one further run, each as ``KIND:KEY=VALUE:...`` with the keys of ``[attack]``.
        from_step: First step in which an attacker lies; by default a quarter of the steps.
        stages: Stages of the attackers; by default the first middle stage, or the first two where two are needed.
    """

    kinds: Sequence[str] | None = None
    together: Sequence[str] = ()
    steps: int = 16
    from_step: int | None = None
    rate: float | None = None
    stages: Sequence[int] | None = None


@dataclass(frozen=True)
class DrillRun:
    """One run of a drill.

    Attributes:
        liars: Parties that lie, each with its attack; empty in the undisturbed run.
        is_remote: Whether the liars are on other machines, where the laboratory's worker is started by hand.
    """

    run: StagedRun
    liars: Mapping[str, AttackConfig]
    is_remote: bool = False

    @property
    def planned_steps(self) -> list[int]:
        """Steps in which an attacker lies, if it follows its plan and is not found before."""
        attacks = [make_attack(attacker, party, None) for party, attacker in self.liars.items()]
        return [step for step in range(self.run.train.steps) if any(attack.lies_in(step) for attack in attacks)]

    def start_instructions(self) -> str:
        """How the workers are to be started, where they are remote."""
        if not self.liars:
            return f"start every worker of the run {_HONEST}; nobody attacks"
        named = ", ".join(self.liars)
        # also names the other parties of a run file's section; each has an entry of its own here
        plan = AttackPlan(
            attackers={name: attacker.model_copy(update={"also": ()}) for name, attacker in self.liars.items()}
        )
        return (
            f"start every worker of the run: {named} with `python -m phalanx.lab.attacks.worker ATTACK.toml "
            f"WORKER.toml`, in the place of the honest process, all others {_HONEST}; WORKER.toml is what `phalanx "
            f"join` has made, such as {next(iter(self.liars))}/worker.toml, and ATTACK.toml holds:\n"
            f"{dump_toml(plan)}"
        )


def drill_scenes(run_file: RunConfig, drill: Drill) -> dict[str, DrillRun]:
    """The shortened run without an attacker, as "none", and with each attack."""
    run = _with_stages(run_file)
    optimizer = run.optimizer.model_copy(update={"warmup_steps": min(run.optimizer.warmup_steps, drill.steps - 1)})
    short: dict[str, Any] = {
        "train": run.train.model_copy(update={"steps": drill.steps, "epochs": None, "validate_every": 0}),
        "optimizer": optimizer,
        "checkpoint": run.checkpoint.model_copy(update={"every": 0}),
        # a drill is no run that a metrics sink was asked to hear of
        "tracking": None,
    }
    runs = {}
    # parsed again, so that what is said about stages and steps is checked for each
    for name, attack in {"none": AttackConfig(), **drill_attacks(run, drill)}.items():
        if run.pipeline.remote_workers:
            _check_places(run, attack)
            runs[name] = DrillRun(
                _with_checked_sections(run, {**short, "attack": None}), _attacking_parties(run, attack), is_remote=True
            )
        else:
            runs[name] = DrillRun(
                _with_checked_sections(run, {**short, "attack": attack}), _attacking_parties(run, attack)
            )
    return runs


def drill_attacks(run: StagedRun, drill: Drill) -> dict[str, AttackConfig]:
    """Return the attacks that a drill plays, by their names in its table.

    Raises:
        ConfigError: An attack is unknown, lacks a value in the options and ``[attack]``, or never takes place.
    """
    load_attack(run.attack, run.home)
    attacks = {kind: _of_kind(run, drill, kind) for kind in _drill_kinds(run, drill)}
    if run.attack.also and drill.kinds is None and not drill.together:
        attacks = {_attack_label(run.attack): _of_section(run, drill)}
    if drill.together:
        attack = _combine_attacks([_parse_attack(run, drill, text) for text in drill.together])
        attacks[_attack_label(attack)] = attack
    if not attacks:
        raise ConfigError("attack: no attack is named; give --kinds, or remove it for the default ones")
    for name, attack in attacks.items():
        if not attack.single_attacks:
            raise ConfigError(f"attack: {name!r} is no attack; see --list")
        check_attack(attack)
        late = [attacker.from_step for attacker in attack.single_attacks if attacker.from_step >= drill.steps]
        if late:
            raise ConfigError(f"attack: {drill.steps} steps, and nobody lies before step {late[0]}; raise --steps")
    return attacks


def _drill_kinds(run: StagedRun, drill: Drill) -> Sequence[str]:
    if drill.kinds is not None:
        kinds = [pin_reference(kind, run.home) if is_own(kind) else kind for kind in drill.kinds]
        for kind in filter(is_own, kinds):
            open_own_code(kind, run.home)
        return kinds
    if drill.together:
        return ()
    return DEFAULT_KINDS if run.attack.kind == "none" else (run.attack.kind,)


def _drilled_section(run: StagedRun, drill: Drill) -> dict[str, Any]:
    """Return the ``[attack]`` section with the options applied; keys without a value are left out."""
    settings = {key: getattr(run.attack, key) for key in run.attack.model_fields_set - {"kind", "also"}}
    options = {"from_step": drill.from_step, "rate": drill.rate, "stages": drill.stages and tuple(drill.stages)}
    return {
        "from_step": drill.steps // 4,
        **settings,
        **{key: value for key, value in options.items() if value is not None},
    }


def _of_kind(run: StagedRun, drill: Drill, kind: str) -> AttackConfig:
    """Make an attack of one run; it gets two stages where it needs two and no option names any."""
    section = _drilled_section(run, drill)
    attack = _make_attack_config({**section, "kind": kind})
    if "stages" not in section:
        try:
            check_attack(attack)
        except ConfigError:
            return attack.model_copy(update={"stages": (1, 2)})
    return attack


def _of_section(run: StagedRun, drill: Drill) -> AttackConfig:
    """Make the attackers of the run file, which act together; options for one place or time do not apply to them."""
    if drill.stages is not None:
        raise ConfigError("attack: --stages is for one kind of attack, and the run file has several; remove it")
    changed = {"from_step": drill.from_step, "rate": drill.rate}
    changes = {key: value for key, value in changed.items() if value is not None}
    return _combine_attacks(
        [
            _make_attack_config({**attacker.model_dump(exclude={"also"}), **changes})
            for attacker in run.attack.single_attacks
        ]
    )


def _parse_attack(run: StagedRun, drill: Drill, text: str) -> AttackConfig:
    """Read ``KIND:KEY=VALUE:...``."""
    kind, *settings = text.split(":")
    section_keys = {}
    for setting in settings:
        keys, value = parse_override(setting)
        section_keys[".".join(keys)] = tuple(value) if isinstance(value, list) else value
    # seed and the like are for all attackers, a place is for one alone
    section = {
        key: value for key, value in _drilled_section(run, drill).items() if key in ("from_step", "rate", "seed")
    }
    return _make_attack_config({**section, **section_keys, "kind": kind})


def _combine_attacks(attacks: Sequence[AttackConfig]) -> AttackConfig:
    """Attackers of one run."""
    first, *others = attacks
    return _make_attack_config({**first.model_dump(exclude={"also"}), "also": tuple(others)})


def _make_attack_config(settings: Mapping[str, Any]) -> AttackConfig:
    try:
        return AttackConfig(**settings)
    except ValueError as exc:
        raise ConfigError(f"attack: {settings.get('kind')}: {_first_line(exc)}") from exc


def _with_stages(run: RunConfig) -> StagedRun:
    if isinstance(run, StagedRun):
        return run
    raise ConfigError(f"attack: the run file does not allow it: {section_fault(run.engine, ('attack',))}")


def _with_checked_sections(run: StagedRun, update: Mapping[str, Any]) -> StagedRun:
    try:
        return run.with_sections(update)
    except ValueError as exc:
        raise ConfigError(f"attack: the run file does not allow it: {exc}") from exc


def _check_places(run: StagedRun, attack: AttackConfig) -> None:
    middle = range(1, run.pipeline.stages - 1)
    stray = [stage for attacker in attack.single_attacks for stage in attacker.stages if stage not in middle]
    if stray:
        raise ConfigError(f"attack: stages {stray}: only the middle stages {list(middle)} are in other hands")


def _attacking_parties(run: StagedRun, attack: AttackConfig) -> dict[str, AttackConfig]:
    """Return the parties that serve the attacked stages at first, each with its attack."""
    holders = first_assignment(run.pipeline.stages, run.pipeline.worker_names, guarded=False).holders
    attack_of_party: dict[str, AttackConfig] = {}
    for attacker in attack.single_attacks:
        for party in {holders[stage] for stage in attacker.stages}:
            if party in attack_of_party:
                raise ConfigError(f"attack: {party} would lie in two ways; attack one of its stages")
            attack_of_party[party] = attacker.model_copy(update={"also": ()})
    return dict(sorted(attack_of_party.items()))


def _first_line(exc: ValueError) -> str:
    """What pydantic says is wrong, without its frame."""
    lines = [row.strip() for row in str(exc).splitlines()]
    return " ".join(lines[1:3]) if len(lines) > 2 else str(exc)


def _attack_label(attack: AttackConfig) -> str:
    return "+".join(f"{attacker.kind}@{','.join(map(str, attacker.stages))}" for attacker in attack.single_attacks)
