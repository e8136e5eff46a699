"""``calibrate_network``: temperatures and thresholds for a network, with a bound on what leaving early costs."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...kernels.reference.criteria import CRITERIA
from ..answers.exit_rule import ExitRule
from ..basics.arguments import check_mode, check_module
from ..network.early_exit_network import EarlyExitNetwork, check_network
from ..network.learned_from import FILE, NEW, ROLES, LearnedFrom, Samples, learned_by, short
from ..processes.dealing import agree, tensor_digest
from ..training.batches import PixelBatches
from .exit_latency import ExitLatencies, check_latencies, expected_latency
from .report import REPORT_FORMAT, CalibrationReport, exits_by_class, exits_on_test, report_environment
from .samples import (
    SHARES,
    ExitLogits,
    as_identities,
    check_indices,
    check_names,
    collect_logits,
    draw_splits,
    one_of_all,
    refuse_seen,
)
from .search import (
    Budget,
    ScoredSamples,
    curve_of,
    expected_work,
    judged,
    one_budget,
    p_value,
    within_accuracy,
    within_cost,
)
from .thresholds import check_number, exit_indices, exit_scores, fit_temperatures, threshold_path

#: Whatever yields batches of input and labels, such as a DataLoader.
Loader = Iterable[Any]
#: Samples by their places in the order of a loader.
Indices = Sequence[int] | Tensor


def calibrate_network(
    network: EarlyExitNetwork,
    data: Loader | Mapping[str, Loader],
    *,
    max_accuracy_drop: float | None = None,
    max_latency_ms: float | None = None,
    max_work: float | None = None,
    latencies: ExitLatencies | None = None,
    confidence: float = 0.9,
    seed: int = 0,
    splits: Mapping[str, Indices] | None = None,
    train: Set[bytes] | Indices | None = None,
    static_model: nn.Module | None = None,
) -> CalibrationReport:
    """Fit temperatures, choose thresholds under a budget, test them on samples that nothing was chosen with.

    The network runs once over the data; all else is tensor maths. On the split "temperature" each exit gets its
    temperature and a path of candidates is laid, from no exit at all to everyone at the first head. Under an accuracy
    budget the split "thresholds" decides how far along the path it can be shown, with ``confidence``, that accuracy on
    new samples drops by at most the budget (Learn then Test, see the module ``search``); the last such candidate is
    taken. Under a budget of latency or work the strictest candidate that meets it on the split "temperature" is taken,
    and the split "thresholds" bounds what it costs. The split "test" is looked at once, for the report.

    The rules of the network are then set: threshold and temperature; criteria stay, and heads that are not enabled stay
    so. A budget that cannot be kept raises nothing: ``report.bound`` says so, with the best that is reachable; under
    an accuracy budget nobody leaves early then.

    What weights, temperatures and thresholds were made from is noted with the network (``network.learned_from``), by
    :func:`train`, here, and in checkpoints. Samples of the weights are left out, and those that an earlier calibration
    has chosen with stay in their split, and are never tested on. Where it is not known, ``report.bound.unknown`` says
    so, and nothing is promised; who gives ``train`` answers for that.

    Under torchrun, with a process group, whole batches are dealt to the processes in turns. Each gets the report and
    the rules that one process alone would, and is given the same arguments: a loader goes through all batches in each.

    Args:
        network: in eval mode.
        data: yields batches of input [N, ...] and labels [N], or of several inputs as :func:`train` takes them: one
            loader that is split here, or a dict of three, "temperature", "thresholds" and "test".
        max_accuracy_drop: 0.01 is one percentage point. This, ``max_latency_ms`` or ``max_work``.
        max_latency_ms: what a batch may take on average, milliseconds, from the call until the host has the answer.
        max_work: how much of the backbone a sample may take on average, as a share of its FLOPs, 0 to 1. They are
            counted for the first batch (:meth:`Flow.work_at`), and the same on every device and for every runner; those
            of heads are none of the backbone's.
        latencies: of the runner that will answer, by :func:`measure_exit_latencies`. A batch leaves when its last
            sample does; batches are samples in a row, in the order of each split.
        confidence: of the bound, between 0 and 1.
        seed: of the splits that are drawn: 20, 50 and 30 %, equal samples together.
        splits: indices of samples instead, in the order of the loader, for each of the three.
        train: the samples that the network has learned from, by their contents (:func:`sample_identities`) or by their
            indices in the order of the loader, beside those that are noted; an empty set, if it is none of these.
            Drawn splits leave them out, and what equals them; given ones that hold one are refused.
        static_model: another network, for comparison on the test split.

    Raises:
        TypeError, ValueError: arguments that are none of these, or splits that share a sample, with each other or with
            ``train``, by index or content, or arguments that differ between processes; nothing is changed.
        RankFailed: another process could not answer for its batches.

    Warns:
        UserWarning: the classifier is no better than chance; the first sentence of ``str(report)``, too.

    Example:
        >>> backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
        >>> held_out = [(torch.randn(50, 3, 8, 8), torch.randint(0, 5, (50,))) for _ in range(4)]
        >>> network = EarlyExitNetwork(backbone, {"1": FusedAuxHead(8, 5)}, example_input=held_out[0][0]).eval()
        >>> report = calibrate_network(network, held_out, max_work=0.9, train=set())
        >>> report.samples
        {'temperature': 40, 'thresholds': 100, 'test': 60}
    """
    budget = one_budget(max_accuracy_drop, max_latency_ms, max_work, latencies)
    prepared = prepare(
        network, data, {"budget": budget}, latencies, confidence, seed, splits=splits, train=train,
        static_model=static_model,
    )  # fmt: skip
    report = calibrate_prepared(network, prepared, budget)
    if report.chance is not None:
        warnings.warn(report.chance, stacklevel=2)
    return report


def calibrate_prepared(network: EarlyExitNetwork, prepared: "Prepared", budget: Budget) -> CalibrationReport:
    """Do as :func:`calibrate_network`, but warn of nothing, given what the network has said of all samples."""
    report, rules = _calibrated(network, prepared, budget)
    learned, samples = prepared.learned, prepared.samples
    numbers = [list(rule.numbers) for rule in rules]
    report = replace(report, parameters=list(learned.parameters), rules=numbers)
    for head, rule in zip(network.exit_heads, rules, strict=True):
        head.rule.assign(rule)
    for name in ROLES[1:]:
        own = prepared.parts[name]
        learned = learned.plus(name, samples._replace(hashes=[each[own] for each in samples.hashes]))
    network.learned_from = learned
    return report


class Prepared(NamedTuple):
    """What the exits say of all samples, the splits, and what is known of who was learned from."""

    collected: ExitLogits
    parts: dict[str, Tensor]
    """Indices of the samples of each split."""
    seed: int | None
    """Of the splits; None where they were given."""
    samples: Samples
    learned: LearnedFrom
    """What the network has learned from before this, with what the caller says."""
    left_out: int
    """Number of samples that weights were made from, and that are in no split."""
    unknown: str | None
    """Why it is not known whether the network has learned from these samples; else None."""
    latencies: ExitLatencies | None
    confidence: float


def prepare(
    network: EarlyExitNetwork,
    data: Loader | Mapping[str, Loader],
    asked: Mapping[str, object],
    latencies: ExitLatencies | None,
    confidence: float,
    seed: int,
    *,
    splits: Mapping[str, Indices] | None,
    train: Set[bytes] | Indices | None,
    static_model: nn.Module | None = None,
) -> Prepared:
    """Check arguments, run the network over the data, and split it, see :func:`calibrate_network`, which has them all.

    Processes that work together have to agree on ``asked``, too.
    """
    check_network(network)
    check_mode(network)
    if latencies is not None:
        check_latencies(latencies, len(network.taps))
    check_number("confidence", confidence, math.ulp(0.0), math.nextafter(1.0, 0.0), "a number between 0 and 1")
    if type(seed) is not int:
        raise TypeError(f"seed: got {seed!r}, wants a whole number")
    if static_model is not None:
        check_module("static_model", static_model)
        check_mode(static_model, "static_model")
    agree(lambda: _facts(network, {**asked, "latencies": latencies, "confidence": confidence, "seed": seed}))
    collected, parts = _collect(network, data, splits, static_model)
    by_index = not isinstance(data, Mapping)
    known = None if train is None else as_identities(train, collected.identities, by_index=by_index)
    files = data.split.contents if isinstance(data, PixelBatches) else None
    hashes = [short(collected.identities), *([] if files is None else files)]
    samples = Samples(hashes, collected.kinds if files is None else frozenset([FILE]))
    learned = learned_by(network)
    if known is not None:
        learned = replace(learned, unknown=None).plus("weights", samples._replace(hashes=[short(known)]))
    roles, unknown = learned.roles(samples)
    if not parts:
        parts = draw_splits(collected.identities, seed, None if (roles == NEW).all() else roles.tolist())
    refuse_seen(collected.identities, parts, roles)
    agree(lambda: {f"samples of {name}": tensor_digest(part) for name, part in parts.items()})
    if latencies is not None and latencies.batch_size > min(map(len, parts.values())):
        raise ValueError(
            f"latencies: are of batches of {latencies.batch_size}, wants at most {min(map(len, parts.values()))}, the "
            "samples of the smallest split"
        )
    given = splits is not None or isinstance(data, Mapping)
    unknown = unknown if known is None else None
    seen, used = int((roles == 0).sum()), None if given else seed
    return Prepared(collected, parts, used, samples, learned, seen, unknown, latencies, confidence)


def _calibrated(
    network: EarlyExitNetwork, prepared: Prepared, budget: Budget
) -> tuple[CalibrationReport, list[ExitRule]]:
    """Return the report and the rules for what a network has said."""
    collected, parts, unknown = prepared.collected, prepared.parts, prepared.unknown
    latencies, confidence = prepared.latencies, prepared.confidence
    rules = [head.rule for head in network.exit_heads]
    own = parts["temperature"]
    temperatures = fit_temperatures(collected.logits[:, own], collected.labels[own]).tolist()
    scores = exit_scores(collected.logits[:-1], [rule.criterion for rule in rules], temperatures[:-1])
    correct = collected.logits.argmax(2) == collected.labels
    samples = {name: ScoredSamples(scores[:, part], correct[:, part]) for name, part in parts.items()}
    fitting, testing, count = samples["temperature"], samples["test"], len(parts["thresholds"])

    ranges = [CRITERIA[rule.criterion].range for rule in rules]
    path = threshold_path(fitting.scores, fitting.correct, ranges, [rule.enabled for rule in rules])
    curve = curve_of(path, samples["thresholds"], [high for _, high in ranges], collected.work, latencies)
    if budget.name == "max_accuracy_drop":
        curve = judged(curve, count, budget.value, confidence)
        chosen, bound = within_accuracy(curve, count, budget.value, confidence, known=unknown is None)
    else:
        fitted = [exit_indices(fitting.scores, one) for one in path]
        if budget.name == "max_work":
            expected, unit = [expected_work(one, collected.work) for one in fitted], "{:.3%} of the backbone's FLOPs"
        else:
            assert latencies is not None
            expected, unit = [expected_latency(one, latencies) for one in fitted], "{:.4g} ms"
        chosen, bound = within_cost(curve, expected, count, budget.value, confidence, unit)

    exits = exit_indices(testing.scores, path[chosen])
    accuracy, full = testing.right(exits).double().mean().item(), testing.correct[-1].double().mean().item()
    logits, labels = collected.logits[:, parts["test"]], collected.labels[parts["test"]]
    static = None if collected.static_labels is None else collected.static_labels[parts["test"]] == labels
    report = CalibrationReport(
        format=REPORT_FORMAT,
        data=None,
        seed=prepared.seed,
        samples={name: len(part) for name, part in parts.items()},
        left_out=prepared.left_out,
        parameters=[],
        rules=[],
        chance=_chance(network.taps, collected, torch.cat(list(parts.values()))),
        budget={budget.name: budget.value},
        bound=replace(bound, unknown=unknown),
        exits=exits_on_test(
            network, logits, labels, exits, temperatures, curve[chosen].thresholds, collected.work, latencies
        ),
        classes=exits_by_class(labels, exits, testing.correct, logits.shape[2]),
        accuracy=accuracy,
        full_accuracy=full,
        accuracy_drop=full - accuracy,
        mean_exit=exits.double().mean().item(),
        expected_work=expected_work(exits, collected.work),
        latencies=latencies,
        expected_latency_ms=None if latencies is None else expected_latency(exits, latencies),
        static_accuracy=None if static is None else static.double().mean().item(),
        chosen=chosen,
        curve=curve,
        environment=report_environment(network.device),
    )
    found = [
        ExitRule(threshold, criterion=rule.criterion, temperature=temperature, enabled=rule.enabled)
        for rule, threshold, temperature in zip(rules, path[chosen].tolist(), temperatures[:-1], strict=True)
    ]
    return report, found


def _facts(network: EarlyExitNetwork, asked: Mapping[str, object]) -> dict[str, str]:
    """Return what processes that calibrate together have to agree on before they begin."""
    state = network.state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return {
        "network: names": str(len(state)),
        **{f"network: {name}": tensor_digest(value) for name, value in tensors.items()},
        **{name: str(value) for name, value in asked.items()},
    }


def _collect(
    network: EarlyExitNetwork,
    data: Loader | Mapping[str, Loader],
    splits: Mapping[str, Indices] | None,
    static_model: nn.Module | None,
) -> tuple[ExitLogits, dict[str, Tensor]]:
    """Run the network over all data, and return what it says with the indices of each split, if they are given."""
    if not isinstance(data, Mapping):
        if splits is None:
            return collect_logits(network, data, static_model), {}
        check_names("splits", splits)
        collected = collect_logits(network, data, static_model)
        count = len(collected.labels)
        return collected, {name: check_indices(f"splits[{name!r}]", splits[name], count) for name in SHARES}
    check_names("data", data)
    if splits is not None:
        raise ValueError("splits: got indices, wants None where data is a dict of three loaders")
    each = [collect_logits(network, data[name], static_model, f"data[{name!r}]") for name in SHARES]
    places = torch.arange(sum(len(one.labels) for one in each), device="cpu")
    parts = dict(zip(SHARES, places.split([len(one.labels) for one in each]), strict=True))
    return one_of_all(each), parts


def _chance(taps: Sequence[str], collected: ExitLogits, own: Tensor) -> str | None:
    """Say so where a sign test, at 5 %, does not show the classifier to be better than the majority class."""
    labels = collected.labels[own]
    most = int(labels.bincount().argmax())
    right = collected.logits.argmax(2)[:, own] == labels  # [E + 1, M]
    better, worse = (right & (labels != most)).sum(1).tolist(), (~right & (labels == most)).sum(1).tolist()
    *heads, classifier = [p_value(less, more + less, 0.5) <= 0.05 for more, less in zip(better, worse, strict=True)]
    if classifier:
        return None
    *shares, share = right.double().mean(1).tolist()
    always = (labels == most).double().mean().item()
    sure = [f"{tap} {part:.1%}" for tap, part, is_better in zip(taps, shares, heads, strict=True) if is_better]
    asks = "Thresholds mean nothing here: is it trained, and are labels, classes and preprocessing those that it knows?"
    if sure:
        asks = f"Heads are better: {', '.join(sure)}; is it the classifier that is not trained, or of other classes?"
    return (
        f"The classifier is not shown to be better than chance: of {len(own):,} samples it gets {share:.1%} right; "
        f"to say class {most} always would get {always:.1%}, and a random label {1 / collected.logits.shape[2]:.1%}. "
        f"{asks}"
    )
