"""The verdict of an explanation in one sentence, with the figures that it rests on."""

from __future__ import annotations

from ...records.text.numbers import bytes_text, number_text, seconds_text
from .exchange_costs import hidden_exchange
from .links import Link, busiest, exchange_seconds
from .verdict import NEARLY_ALL, NOTABLE, SLOW, Explanation, NodeView
from .words import NAMES, bits_text, percent

__all__ = ["headline"]


def headline(explanation: Explanation) -> str:
    """Return the verdict in one sentence, with the figures that it rests on."""
    writer = {
        "starved": _starved,
        "network": _network,
        "compute": _compute,
        "data": _data,
        "peers": _peers,
        "idle": _idle,
        "evaluating": _evaluating,
        "translating": _translating,
        "saving": _saving,
        "profiling": _profiling,
        "other": _other,
        "mixed": _mixed,
        "unclear": _unclear,
        "unknown": _unknown,
    }[explanation.verdict]
    return writer(explanation)


def _starved(explanation: Explanation) -> str:
    found = explanation.starved
    if found is None:
        raise ValueError("nobody took this run's cores")
    foreign, own = number_text(found.foreign_cores, 2), number_text(found.cores_available, 2)
    cores = f"{foreign} of the {own} cores that node {found.node} may use"
    if explanation.evidence.job.get("cores_per_node") or found.foreign_cores > found.cores_available:  # a quota on more cores
        cores = f"{foreign} of the cores that node {found.node}, limited to {own}, runs on"
    return (
        f"CPU contention: other programs used {cores}, {percent(found.fraction)} of the CPU time that its tasks needed. "
        "The figures below are of a busy machine, so there is no recommendation. Run it again on a quiet one."
    )


def _exchange(explanation: Explanation) -> str:
    return "an all-reduce" if explanation.evidence.summary["mode"] == "sync" else "a push and pull"


def _network(explanation: Explanation) -> str:
    kind = "that computation does not hide" if explanation.evidence.summary["mode"] == "sync" else "with the parameter server"
    share = f"communication-bound: {percent(explanation.step_fractions['network'])} of a worker's step is communication {kind}"
    link = busiest(explanation.evidence.links)
    full = f"node {link.node}'s link runs at {percent(link.fraction)} of {_speed(link)} while it trains" if link is not None else None
    if explanation.network_cause == "link":
        return f"{share}, and {full}."
    though = f"; no link is full ({full})" if full else ""
    if explanation.network_cause == "messages":
        few = f"{_exchange(explanation)} of a few bytes takes {percent(explanation.message_fraction)} of the time of the full one"
        return f"{share}: latency and overhead more than bandwidth{though}; {few}."
    if explanation.network_cause == "waiting":
        alone = seconds_text(exchange_seconds(explanation.evidence.calibration))
        return f"{share}, mostly overhead and waiting{though}: {_exchange(explanation)} by itself takes {alone}."
    return f"{share}, for moving and summing {_payload(explanation)} per step{though}."


def _speed(link: Link) -> str:
    return bits_text(link.limit_bytes_per_second or 0.0)


def _payload(explanation: Explanation) -> str:
    calibration = explanation.evidence.calibration
    return bytes_text(calibration["payload_bytes"]) if calibration else "the gradients"


def _compute(explanation: Explanation) -> str:
    share, unknown = explanation.step_fractions["compute"], hidden_exchange(explanation.evidence)
    told = percent(share) if unknown is None else f"about {percent(share * (1 - unknown))} or more"
    text = f"compute-bound: {told} of a worker's step is forward, backward and update"
    busy = [view for view in explanation.nodes if view.gpu_utilization is not None and view.limit == "GPU"]
    if busy:
        return f"{text}; GPUs are busy for {percent(max(view.gpu_utilization or 0.0 for view in busy))} of the time."
    known = [view for view in explanation.nodes if view.cpu_cores_used is not None and view.cores_available is not None]
    if not known:
        return f"{text}."
    most = max(known, key=lambda view: view.cpu_fraction or 0.0)
    return f"{text}; node {most.node} uses {_cores(most)}."


def _cores(view: NodeView) -> str:
    return f"{number_text(view.cpu_cores_used, 2)} of the {number_text(view.cores_available, 2)} cores it may use"


def _data(explanation: Explanation) -> str:
    return (
        f"data-bound: {percent(explanation.step_fractions['data'])} of a worker's step is gathering, augmenting and normalising the batch."
    )


def _peers(explanation: Explanation) -> str:
    times = f"takes {number_text(explanation.slowness, 1)} times as long as the median worker's"
    slow = f"node {explanation.slow_node}"
    limit = next(view for view in explanation.nodes if view.node == explanation.slow_node).cores_available
    cores = "" if limit is None else f" (it has {number_text(limit, 2)} cores)"
    if explanation.evidence.summary["mode"] == "sync":
        waits = percent(explanation.step_fractions["peers"])
        text = f"straggler: workers wait for {slow} for {waits} of a step; its own work {times}{cores}"
        return f"{text}{_exchange_of_the_slow(explanation)}."
    share = percent(next(view for view in explanation.nodes if view.node == explanation.slow_node).updates_fraction)
    return f"straggler: the work of {slow} {times}{cores}. It makes {share} of the updates; no worker waits for it."


def _exchange_of_the_slow(explanation: Explanation) -> str:
    """What is to be said of an exchange in which all wait for a node that has no core to spare."""
    view = next(view for view in explanation.nodes if view.node == explanation.slow_node)
    share = explanation.step_fractions["network"]
    if share < NOTABLE or explanation.network_cause == "link" or (view.cpu_fraction or 0.0) < NEARLY_ALL:
        return ""
    used = percent(view.cpu_fraction)
    return f"; communication, {percent(share)} of the step, waits for it too, as it uses {used} of its cores"


def _evaluating(explanation: Explanation) -> str:
    evidence = explanation.evidence
    each = evidence.summary["eval_seconds"] / max(1, evidence.evaluations)
    how = f"{evidence.evaluations} evaluation{'s' if evidence.evaluations != 1 else ''} of {number_text(each, 3)} s"
    return f"evaluation is the bottleneck: it takes {percent(explanation.run_fractions['evaluating'])} of the run time ({how})."


def _translating(explanation: Explanation) -> str:
    evidence = explanation.evidence
    share, seconds = percent(explanation.run_fractions["translating"]), number_text(evidence.summary["translate_seconds"], 1)
    finished = "" if evidence.summary["translated"] else ", and was not finished"
    return (
        f"the final translation is the bottleneck: it takes {share} of the run time ({seconds} s{finished}). "
        "It happens once, so its share falls in longer runs."
    )


def _saving(explanation: Explanation) -> str:
    share = percent(explanation.run_fractions["saving"])
    saved = explanation.evidence.saved
    return (
        f"checkpoints are the bottleneck: they pause training for {share} of the run time ({saved} saved), not counting background writing."
    )


def _profiling(explanation: Explanation) -> str:
    summary = explanation.evidence.summary
    share, seconds = percent(explanation.run_fractions["profiling"]), number_text(summary["profile_seconds"], 1)
    return f"profiling is the bottleneck: it takes {share} of the run time ({seconds} s). Run without --profile."


def _idle(explanation: Explanation) -> str:
    summary = explanation.evidence.summary
    share, seconds = percent(explanation.run_fractions["idle"]), number_text(summary["run_seconds"], 2)
    size = number_text((summary["step_seconds"] or {}).get("group_size"), 0)
    waits = f"workers wait for their next steps, or for the run's end, for {share} of the run's {seconds} s"
    return f"idle workers: {waits}; they get {size} steps at a time."


def _other(explanation: Explanation) -> str:
    seconds = number_text(explanation.evidence.summary["run_seconds"], 2)
    share = percent(explanation.run_fractions["other"])
    lost = explanation.evidence.summary.get("restart_seconds_lost") if explanation.evidence.part_began_seconds is None else None
    more = f"restarts took {number_text(lost, 2)} s of it" if lost else "measure a longer run"
    return f"idle and coordination: {share} of the run's {seconds} s is neither training nor evaluation; {more}."


def _mixed(explanation: Explanation) -> str:
    return f"nothing dominates: {_list(explanation, ' and ')}."


def _unclear(explanation: Explanation) -> str:
    shares, slow = explanation.evidence.shares, explanation.slow_node
    doubtful = shares is not None and slow == shares.slowest.node and set(explanation.candidates) <= {"compute", "data", "peers"}
    if shares is not None and doubtful and abs(shares.slowness - SLOW) <= shares.slowness_uncertainty:
        times = f"{number_text(shares.slowness, 2)} ± {number_text(shares.slowness_uncertainty, 2)} times"
        return (
            f"unclear whether node {slow} is a straggler: its own work takes {times} as long as the median worker's; the limit is {SLOW}. "
            f"The bottleneck is {_list(explanation, ' or ')}."
        )
    return f"unclear: {_list(explanation, ' or ')}; the difference is too small to decide."


def _list(explanation: Explanation, joint: str) -> str:
    words, uncertain = [], False
    for component in explanation.candidates:
        name, fraction = NAMES[component], explanation.run_fractions[component]
        if component == "peers" and explanation.evidence.summary["mode"] == "async":  # nobody waits: a slow node shows in its own work
            name, fraction = "the work of a slow node", sum(explanation.run_fractions[own] for own in ("compute", "data"))
        spread = explanation.run_uncertainty.get(component, 0.0)
        uncertain |= spread >= 0.01
        more = f" ± {percent(spread)}" if spread >= 0.01 else ""
        words.append(f"{name} {percent(fraction)}{more}")
    listed = joint.join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    return f"{listed} of the run time{' (±: spread of the calibration)' if uncertain else ''}"


def _unknown(explanation: Explanation) -> str:
    if explanation.evidence.steps_mixed:
        return "no verdict: the run changed when it was resumed, and only its last part was calibrated."
    return "no verdict: the run was not calibrated."
