"""The headline of a run: its outcome in plain words and in a few figures."""

from collections import Counter
from typing import Any

from phalanx.report.figures import (
    NOT_MEASURED,
    format_amount,
    format_count,
    format_duration,
    format_plural,
    parse_number,
    short_text,
)
from phalanx.report.read import RunRecord

_MOST = 400
"""Characters of a sentence that a run says of itself."""
STATUS_WORDS = {"completed": "Completed", "failed": "Failed", "interrupted": "Interrupted"}


def run_status(record: RunRecord) -> str:
    """Return the status as the summary has it, or ``unfinished``."""
    state = record.summary.get("status")
    return state if isinstance(state, str) and state in STATUS_WORDS else "unfinished"


def headline_sentence(record: RunRecord) -> str:
    """Return one sentence: findings, repairs and their cost, and no more than is known."""
    summary = record.summary
    if not summary:
        steps = len({row["step"] for row in record.metrics})
        return f"No final figures: {format_plural(steps, 'step')} recorded so far."
    split = split_facts(record)
    has_workers = not split or split.get("workers_see") is not None
    parts = [_worse_sentence(summary)]
    parts += [short_text(split.get(key), _MOST) for key in ("worth", "workers_see") if split.get(key) is not None]
    attacks = _format_attacks(summary, record) if has_workers and not rounds_facts(record) else ""
    parts += [*_round_sentences(record), attacks or _trained_sentence(record), _pair_sentence(summary)]
    parts += _blame_sentences(summary, record) if has_workers else []
    lost, unit = parse_number(summary.get("steps_lost")), "round" if rounds_facts(record) else "step"
    if lost is not None:
        parts.append(f"{format_plural(lost, unit)} lost")
    sentence = ", ".join(part for part in parts if part)
    return f"{sentence[:1].upper()}{sentence[1:]}."


def headline_tiles(record: RunRecord) -> list[tuple[str, str, str]]:
    """Return the figures at the top of the page as (name, value, remark)."""
    summary = record.summary
    loss = f"{format_amount(summary.get('loss_first'))} → {format_amount(summary.get('loss_last'))}"
    perplexity, classes = format_amount(summary.get("validation_perplexity")), classification_facts(record)
    before = parse_number(summary.get("validation_perplexity_first"))
    unigram = parse_number(summary.get("unigram_perplexity"))
    remarks = [f"{before:.4g} before training"] if before is not None else []
    remarks += [f"unigram model {unigram:.4g}"] if unigram is not None else []
    rounds, pairs = rounds_facts(record), _as_mapping(summary.get("preferences"))
    if classes:
        measured = _accuracy_tile(classes)
    elif pairs:
        measured = _pair_accuracy(pairs)
    else:
        measured = ("Validation perplexity", perplexity, ", ".join(remarks))
    last = (
        [_sites_tile(record)] if rounds else [_guard_tile(record)] if has_guard(record) or split_facts(record) else []
    )
    unit = "pair" if pairs else "text" if classes else "token"
    return [
        (
            "Rounds" if rounds else "Steps",
            format_count(summary.get("steps")),
            f"{format_count(summary.get('tokens'))} tokens",
        ),
        ("Training loss", loss, f"nats a {unit}, first → last"),
        measured,
        ("Speed", _format_speed(summary), format_duration(summary.get("wall_s"))),
        *last,
        ("World", _format_world(summary.get("world")), f"seed {short_text(summary.get('seed'), 30)}"),
    ]


def ending_sentences(record: RunRecord) -> list[str]:
    """Return sentences about an early end and about the best checkpoint; none where the run has neither."""
    facts, stopped, best = [], record.summary.get("stopped_early"), record.summary.get("best_checkpoint")
    if isinstance(stopped, dict):
        row = {key: format_count(stopped.get(key)) for key in ("step", "best_step", "validations_without_improvement")}
        facts.append(
            f"The run ended early after step {row['step']}: {row['validations_without_improvement']} validations in "
            f"a row on {short_text(stopped.get('on'), 40)} without improvement; the best was after step "
            f"{row['best_step']}."
        )
    if isinstance(best, dict):
        doubt = " It has steps in doubt." if best.get("in_doubt") is True else ""
        facts.append(
            f"The best checkpoint is that of step {format_count(best.get('step'))}, "
            f"with a loss of {format_amount(best.get('loss'))} "
            f"on {short_text(best.get('on'), 40)}.{doubt}"
        )
    return facts


def split_facts(record: RunRecord) -> dict[str, Any]:
    """Return the summary's facts about a split: mode, tier and its worth; empty for other runs."""
    facts = record.summary.get("split")
    return facts if isinstance(facts, dict) else {}


def classification_facts(record: RunRecord) -> dict[str, Any]:
    """Return the summary's facts about a classification; empty for other runs."""
    facts = record.summary.get("classification")
    return facts if isinstance(facts, dict) else {}


def rounds_facts(record: RunRecord) -> dict[str, Any]:
    """Describe the rounds of a federated run, from its summary; empty for other runs."""
    return _as_mapping(record.summary.get("federated"))


def has_guard(record: RunRecord) -> bool:
    """Whether anybody checked what other parties computed, as far as summary and run file say."""
    mode = record.summary.get("guard")
    return (mode if isinstance(mode, str) else guard_mode(record)) != "off"


def worse_facts(record: RunRecord) -> list[str]:
    """Return by which figures the model is worse than before training; empty where it is not, or nobody measured."""
    worse = record.summary.get("worse_than_before")
    return [short_text(one, 120) for one in worse[:8]] if isinstance(worse, list) else []


def _worse_sentence(summary: dict[str, Any]) -> str:
    worse = summary.get("worse_than_before")
    named = ", ".join(short_text(one, 120) for one in worse[:8]) if isinstance(worse, list) else ""
    return f"the model is worse than before training ({named})" if named else ""


def _trained_sentence(record: RunRecord) -> str:
    """What there is to say where nobody checked anybody: how long it trained."""
    if rounds_facts(record) or split_facts(record):
        return ""
    steps = parse_number(record.summary.get("steps"))
    return "" if steps is None else f"{format_plural(steps, 'step')} trained"


def _round_sentences(record: RunRecord) -> list[str]:
    """The rounds, sites and privacy of a federated run; nothing of other runs."""
    facts = rounds_facts(record)
    if not facts:
        return []
    sites, out = facts.get("sites"), _as_mapping(facts.get("excluded"))
    number_of = len(sites) if isinstance(sites, list) else 0
    rounds = parse_number(record.summary.get("steps"))
    parts = [f"{format_plural(rounds or 0, 'round')} of {format_plural(number_of, 'site')}"]
    parts.append(f"the owner sees {short_text(facts.get('owner_sees'), 160)}")
    parts += [
        f"{short_text(site, 60)} gets no further orders ({short_text(reason, 80)})"
        for site, reason in list(out.items())[:8]
    ]
    return [*parts, _spent_sentence(record)]


def _spent_sentence(record: RunRecord) -> str:
    """What of a privacy budget is spent, and whose data it protects."""
    privacy = _as_mapping(record.summary.get("privacy"))
    if not privacy:
        return ""
    bound = f"epsilon {format_amount(privacy.get('epsilon_spent'))} of {format_amount(privacy.get('epsilon'))}"
    return f"{bound} spent, which protects {short_text(privacy.get('example'), 80)}"


def _pair_sentence(summary: dict[str, Any]) -> str:
    pairs = _as_mapping(summary.get("preferences"))
    if parse_number(pairs.get("accuracy")) is None:
        return ""
    return (
        f"accuracy {format_amount(pairs['accuracy'])} and margin {format_amount(pairs.get('margin'))} on held-out pairs"
    )


def _pair_accuracy(pairs: dict[str, Any]) -> tuple[str, str, str]:
    """How often the better answer of a held-out pair is worth more, and by how much."""
    names = {
        "margin": "margin",
        "before training": "accuracy_first",
        "margin before": "margin_first",
        "loss of a pair": "loss",
    }
    remarks = [
        f"{name} {format_amount(pairs[key])}" for name, key in names.items() if parse_number(pairs.get(key)) is not None
    ]
    return ("Accuracy on pairs", format_amount(pairs.get("accuracy")), ", ".join(remarks))


def _sites_tile(record: RunRecord) -> tuple[str, str, str]:
    facts = rounds_facts(record)
    sites, out = facts.get("sites"), _as_mapping(facts.get("excluded"))
    total = len(sites) if isinstance(sites, list) else 0
    remarks = [
        short_text(sites, 240),
        f"{short_text(facts.get('algorithm'), 20)}, {short_text(facts.get('aggregator'), 20)}",
        _spent_sentence(record),
    ]
    return ("Sites", f"{total - len(out)} of {total}", ", ".join(remark for remark in remarks if remark))


def _as_mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _accuracy_tile(facts: dict[str, Any]) -> tuple[str, str, str]:
    """How often the class of a held-out text was found, and how often without a model."""
    names = {
        "macro-F1": "macro_f1",
        "before training": "accuracy_first",
        "TF-IDF": "tfidf_accuracy",
        "largest class": "majority_accuracy",
    }
    remarks = [
        f"{name} {format_amount(facts[key])}" for name, key in names.items() if parse_number(facts.get(key)) is not None
    ]
    task = f"{short_text(facts.get('task'), 40)}, {format_count(facts.get('classes'))} classes"
    return ("Accuracy", format_amount(facts.get("accuracy")), ", ".join([task, *remarks]))


def _guard_tile(record: RunRecord) -> tuple[str, str, str]:
    split = split_facts(record)
    if split:
        seen = [short_text(split["workers_see"], _MOST)] if split.get("workers_see") is not None else []
        audits = (
            [f"{format_count(record.summary.get('audits'))} audits", _format_takeovers(record.summary)] if seen else []
        )
        remarks = [short_text(split.get("worth"), 120), *seen, *audits, _shut_out(split)]
        return ("Split", short_text(split.get("mode"), 20), ", ".join(remark for remark in remarks if remark))
    remarks = [_format_preset(record.summary), _format_takeovers(record.summary), _format_guarantees(record.summary)]
    return ("Audits", format_count(record.summary.get("audits")), ", ".join(remark for remark in remarks if remark))


def _shut_out(split: dict[str, Any]) -> str:
    """Say which clients admission has shut out, and for what."""
    admission = split.get("admission")
    excluded = admission.get("excluded") if isinstance(admission, dict) else None
    if not isinstance(excluded, dict) or not excluded:
        return ""
    named = [
        f"{short_text(name, 40)} ({short_text(site.get('reason'), 20)})"
        for name, site in excluded.items()
        if isinstance(site, dict)
    ]
    return f"excluded: {', '.join(named)}"


def guard_mode(record: RunRecord) -> str | None:
    """Return ``guard.mode`` of the run file, or None when it is not known."""
    guard = record.config.get("guard")
    mode = guard.get("mode") if isinstance(guard, dict) else None
    return mode if isinstance(mode, str) else None


def _format_speed(summary: dict[str, Any]) -> str:
    rate = parse_number(summary.get("tokens_per_s"))
    return NOT_MEASURED if rate is None else f"{format_count(rate) if rate >= 100 else format_amount(rate, 3)} tokens/s"


def _format_takeovers(summary: dict[str, Any]) -> str:
    takeovers = parse_number(summary.get("takeovers"))
    return "" if takeovers is None else format_plural(takeovers, "takeover")


def _format_preset(summary: dict[str, Any]) -> str:
    return f"preset {short_text(summary['preset'], 20)}" if isinstance(summary.get("preset"), str) else ""


def _format_guarantees(summary: dict[str, Any]) -> str:
    """Return the numbers of stages in other hands by their worst guarantee."""
    guarantees = summary.get("guarantees")
    names = [name for name in guarantees.values() if isinstance(name, str)] if isinstance(guarantees, dict) else []
    return ", ".join(f"{times} {short_text(name, 20)}" for name, times in Counter(names).items() if name != "own")


def _format_world(world: Any) -> str:
    if isinstance(world, dict) and world and all(parse_number(value) is not None for value in world.values()):
        return ", ".join(f"{short_text(value, 12)} {short_text(key, 20)}" for key, value in list(world.items())[:4])
    return NOT_MEASURED if world is None else short_text(world, 60)


def _format_attacks(summary: dict[str, Any], record: RunRecord) -> str:
    """Describe the attacks found; for a run without a drill, the result of its audits; empty without audits."""
    injected, detected = parse_number(summary.get("attacks_injected")), parse_number(summary.get("detections"))
    if injected:
        off = " (the guard was off)" if guard_mode(record) == "off" else ""
        if detected is None:
            return f"{format_plural(injected, 'step')} attacked, nobody checked{off}"
        return f"{format_count(detected)} of {format_count(injected)} attacked steps detected{off}"
    if not has_guard(record) or summary.get("evicted") or summary.get("verdicts"):
        return ""
    audits = parse_number(summary.get("audits"))
    return f"no lie was found in {format_plural(audits, 'audit')}" if audits else "nothing was audited"


def _blame_sentences(summary: dict[str, Any], record: RunRecord) -> list[str]:
    parts = []
    evicted = summary.get("evicted")
    if isinstance(evicted, list) and evicted:
        stages = _stages_by_party(record)
        named = [
            short_text(party, 60)
            + (f" (stage\u00a0{short_text(stages[party], 10)})" if isinstance(party, str) and party in stages else "")
            for party in evicted[:8]
        ]
        more = f" and {len(evicted) - 8} more" if len(evicted) > 8 else ""
        parts.append(f"{', '.join(named)}{more} evicted")
    false = parse_number(summary.get("false_accusations"))
    # who lied is known of a drill alone
    if false is not None and (false or parse_number(summary.get("attacks_injected"))):
        parts.append(format_plural(false, "false accusation"))
    return parts


def _stages_by_party(record: RunRecord) -> dict[str, Any]:
    parties: dict[str, Any] = {}
    for event in record.events_of("verdict", "evicted", "stage_assigned"):
        party, stage = event["body"].get("party"), event["body"].get("stage")
        if isinstance(party, str) and parse_number(stage) is not None:
            parties.setdefault(party, stage)
    return parties
