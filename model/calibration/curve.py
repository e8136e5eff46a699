"""Anytime curves: accuracy of early exit against mean work and time, from strict thresholds to loose ones."""

import dataclasses
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from ...kernels.reference.criteria import CRITERIA
from ..network.early_exit_network import EarlyExitNetwork
from .calibrate_network import Indices, Loader, Prepared, prepare
from .exit_latency import ExitLatencies
from .report import report_environment
from .search import ScoredSamples, curve_of
from .thresholds import exit_scores, fit_temperatures, scores_of, threshold_behind, threshold_path

#: The value of ``format``; figures refuse others.
CURVE_FORMAT = "auxhead anytime curve 1"
#: Budgets of batches are 1 / 20, 2 / 20, ... of the backbone's FLOPs, from the least that an exit takes.
_BUDGETS = 20
#: Halvings of the search for the shares of exits.
_HALVINGS = 60


@dataclass(frozen=True)
class AnytimePoint:
    """Early exit under one set of thresholds, on the test split; shares and accuracies are from 0 to 1."""

    budget: float | None
    """Mean work that was asked for, as a share of the backbone's FLOPs; None on the path of candidates."""
    thresholds: list[float | None]
    """For each head; None never exits."""
    shares: list[float]
    """Of the samples that leave at each exit."""
    accuracy: float
    """Share of right answers."""
    interval: list[float]
    """Of the accuracy, low and high, for this point by itself."""
    work: float
    """Mean work of a sample, as a share of the backbone's FLOPs."""
    latency_ms: float | None
    """Expected; None without measured latencies."""


@dataclass(frozen=True)
class AnytimeExit:
    """One exit if it answered for all samples of the test split: the network cut off there."""

    name: str
    """The tap, or "classifier"."""
    work: float
    """As a share of the backbone's FLOPs."""
    latency_ms: float | None
    """When a whole batch leaves here; None without measured latencies."""
    accuracy: float
    """Share of right answers."""
    interval: list[float]
    """Of the accuracy, low and high."""


@dataclass(frozen=True)
class AnytimeAnswers:
    """The curves of a network whose exits answer each by itself, as in every runner."""

    path: list[AnytimePoint]
    """Under the candidates of :func:`threshold_path`, from no exit at all to everyone at the first head."""
    budgeted: list[AnytimePoint]
    """Budgeted batch classification, from the least budget to all of the work."""


@dataclass(frozen=True)
class AnytimeReport:
    """The result of :func:`anytime_curve`; shares and accuracies are from 0 to 1, latencies milliseconds."""

    format: str
    """Of the JSON."""
    data: str | None
    """Name of the data, for people."""
    seed: int | None
    """Of the splits; None where they were given."""
    samples: dict[str, int]
    """Number of samples in each split."""
    unknown: str | None
    """Why it is not known whether the network has learned from these samples; else None."""
    confidence: float
    """Of the intervals of accuracies, each by itself (Wilson, 1927)."""
    flops: float | None
    """Of the whole backbone for one sample, two for each multiply-add; None of one without convolutions or products."""
    exits: list[AnytimeExit]
    """The heads, then the classifier."""
    alone: AnytimeAnswers
    """Early exit by either way to thresholds."""
    latencies: ExitLatencies | None
    """As measured."""
    environment: dict[str, Any]
    """Versions and device, for people."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values: dicts, lists, numbers, strings and None."""
        content = dataclasses.asdict(self)
        if self.latencies is not None:
            content["latencies"]["milliseconds"] = list(self.latencies.milliseconds)
        return content

    def __repr__(self) -> str:
        """Say what half of the work gets right, by either way to thresholds."""
        both = self.alone.path, self.alone.budgeted
        path, batch = (min(each, key=lambda point: abs(point.work - 0.5)) for each in both)
        (low, high), full = path.interval, self.exits[-1].accuracy
        return (
            f"With {path.work:.0%} of the work {path.accuracy:.2%} of the test split are right ({low:.1%} to "
            f"{high:.1%} with {self.confidence:.0%} confidence), with all of it {full:.2%}; as a budgeted batch, with "
            f"{batch.work:.0%} of it {batch.accuracy:.2%}."
            + ("" if self.unknown is None else f"\nIt may have learned from these samples: {self.unknown}.")
        )


def anytime_curve(
    network: EarlyExitNetwork,
    data: Loader | Mapping[str, Loader],
    *,
    latencies: ExitLatencies | None = None,
    confidence: float = 0.9,
    seed: int = 0,
    splits: Mapping[str, Indices] | None = None,
    train: Set[bytes] | Indices | None = None,
) -> AnytimeReport:
    """Test early exit at every level of work: accuracy against mean FLOPs and time. The network stays as it is.

    The splits are those of :func:`calibrate_network`, with the same meaning of arguments, errors and processes. On the
    split "temperature" each exit gets its temperature, and a path of candidate thresholds is laid; on the split
    "thresholds" the thresholds of budgeted batches are made. All points are of the split "test", of which nothing is
    chosen; so do not choose there either: once you know the budget that you want, let :func:`calibrate_network` find
    thresholds for it.

    *Budgeted batch classification* (Huang et al., ICLR 2018, arXiv:1703.09844, section 5): a share q of the samples
    that come to an exit leaves there, so that exit k of K answers for z (1 - q)^(k - 1) q of all, where z makes them
    one; q is solved for so that mean work meets a budget, and thresholds are set so that these shares leave. A budget
    above the mean work of all exits takes more samples at later exits, 1 - q > 1, as the authors' program does it.

    Args:
        network: in eval mode; its criteria are taken, and heads that are not enabled let nobody go.
        data: yields batches of input [N, ...] and labels [N], or a dict of three such loaders.
        latencies: of the runner that will answer, by :func:`measure_exit_latencies`, for expected times.
        confidence: of the interval of each accuracy, between 0 and 1.
        seed: of the splits that are drawn.
        splits: indices of samples instead.
        train: the samples that the network has learned from, beside those that are noted.

    Example:
        >>> backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
        >>> held_out = [(torch.randn(50, 3, 8, 8), torch.randint(0, 5, (50,))) for _ in range(4)]
        >>> network = EarlyExitNetwork(backbone, {"1": FusedAuxHead(8, 5)}, example_input=held_out[0][0]).eval()
        >>> report = anytime_curve(network, held_out, train=set())
        >>> report.alone.path[0].work, report.alone.budgeted[-1].work
        (1.0, 1.0)
    """
    prepared = prepare(network, data, {}, latencies, confidence, seed, splits=splits, train=train)
    return curve_of_prepared(network, prepared)


def curve_of_prepared(network: EarlyExitNetwork, prepared: Prepared) -> AnytimeReport:
    """Do as :func:`anytime_curve`, given what the network has said of all samples."""
    collected, parts = prepared.collected, prepared.parts
    fitting, test = parts["temperature"], parts["test"]
    temperatures = fit_temperatures(collected.logits[:, fitting], collected.labels[fitting]).tolist()
    accuracies = (collected.logits[:, test].argmax(2) == collected.labels[test]).double().mean(1).tolist()
    names, latencies = [*network.taps, "classifier"], prepared.latencies
    times = [None] * len(names) if latencies is None else latencies.milliseconds
    exits = zip(names, collected.work, times, accuracies, strict=True)
    return AnytimeReport(
        format=CURVE_FORMAT,
        data=None,
        seed=prepared.seed,
        samples={name: len(part) for name, part in parts.items()},
        unknown=prepared.unknown,
        confidence=prepared.confidence,
        flops=collected.flops or None,
        exits=[AnytimeExit(*one, _interval(prepared, one[-1])) for one in exits],
        alone=_answers(network, prepared, temperatures),
        latencies=latencies,
        environment=report_environment(network.device),
    )


def _answers(network: EarlyExitNetwork, prepared: Prepared, temperatures: Sequence[float]) -> AnytimeAnswers:
    """Return the curves of the exits at temperatures."""
    logits, rules = prepared.collected.logits, [head.rule for head in network.exit_heads]
    ranges, enabled = [CRITERIA[rule.criterion].range for rule in rules], [rule.enabled for rule in rules]
    scores = exit_scores(logits[:-1], [rule.criterion for rule in rules], temperatures[:-1])
    correct, work = logits.argmax(2) == prepared.collected.labels, prepared.collected.work
    fitting, held_out, testing = (
        ScoredSamples(scores[:, part], correct[:, part])
        for part in (prepared.parts[name] for name in ("temperature", "thresholds", "test"))
    )
    opened = [index for index, opens in enumerate([*enabled, True]) if opens]
    budgets = [step / _BUDGETS for step in range(1, _BUDGETS + 1) if step / _BUDGETS >= work[opened[0]]]
    batches = []
    for budget in budgets:
        shares = torch.zeros(len(work), dtype=torch.float64, device="cpu")
        shares[opened] = shares_within([work[index] for index in opened], budget)
        batches.append(thresholds_for(held_out.scores, shares, ranges))

    def tested(path: Sequence[Tensor], budgets: Sequence[float | None]) -> list[AnytimePoint]:
        curve = curve_of(path, testing, [high for _, high in ranges], work, prepared.latencies)
        return [
            AnytimePoint(
                budget=budget,
                interval=_interval(prepared, point.accuracy),
                **{name: getattr(point, name) for name in ("thresholds", "shares", "accuracy", "work", "latency_ms")},
            )
            for point, budget in zip(curve, budgets, strict=True)
        ]

    path = threshold_path(fitting.scores, fitting.correct, ranges, enabled)
    return AnytimeAnswers(path=tested(path, [None] * len(path)), budgeted=tested(batches, budgets))


def _interval(prepared: Prepared, accuracy: float) -> list[float]:
    return wilson_interval(accuracy, len(prepared.parts["test"]), prepared.confidence)


def shares_within(costs: Sequence[float], budget: float) -> Tensor:
    """Return shares [K] float64 of samples at exits, each so many times that before it, whose mean cost is a budget.

    Args:
        costs: of the K exits, none less than that before it.
        budget: from the least cost to the largest.
    """
    each = torch.tensor(costs, dtype=torch.float64, device="cpu")
    places = torch.arange(len(costs), dtype=torch.float64, device="cpu")
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        later = (low + high) / 2  # 1 - q is later / (1 - later): from 0, all at the first exit, to all at the last
        shares = later**places * (1 - later) ** places.flip(0)
        shares /= shares.sum()
        low, high = (later, high) if (shares @ each).item() <= budget else (low, later)
    return shares


def thresholds_for(scores: Tensor, shares: Tensor, ranges: Sequence[tuple[float, float]]) -> Tensor:
    """Return thresholds [E] under which so many samples leave at each head; those of equal scores leave together.

    Args:
        scores: [E, M] float32, larger is surer; no NaN.
        shares: [E + 1] float64, their sum is 1; where it is 0 nobody leaves.
        ranges: of each head the range of its scores; the upper end never exits.
    """
    thresholds = scores_of([high for _, high in ranges])
    open_still = torch.ones_like(scores[0], dtype=torch.bool)
    for head, gone in enumerate(shares.cumsum(0)[:-1].tolist()):
        leaving = round(gone * len(open_still)) - int((~open_still).sum())
        if shares[head] > 0 and leaving > 0:
            falling = scores[head, open_still].sort(descending=True).values
            leaving = int((falling >= falling[leaving - 1]).sum())
            thresholds[head] = threshold_behind(falling, leaving, ranges[head][0])
            open_still &= scores[head] <= thresholds[head]
    return thresholds


def wilson_interval(rate: float, samples: int, confidence: float) -> list[float]:
    """Return the interval, low and high, of a rate of 0 to 1 that was counted on so many samples (Wilson, JASA, 1927).

    In closed form, where a curve has a hundred points; the bound that a calibration promises is exact, see ``search``.
    """
    width = NormalDist().inv_cdf((1 + confidence) / 2) ** 2 / samples
    half = math.sqrt(width * (rate * (1 - rate) + width / 4))
    ends = ((rate + width / 2 + side * half) / (1 + width) for side in (-1, 1))
    return [min(1.0, max(0.0, end)) for end in ends]
