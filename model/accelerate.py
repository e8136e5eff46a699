"""``accelerate``: one line for a whole model, from its own exits to a runner that was checked and timed."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import CRITERIA, decide_in_order
from .answers.exit_result import ExitResult, first_sure
from .answers.exit_rule import ExitRule
from .basics.arguments import check_batch, check_module
from .listening.hooks import is_earlyon
from .listening.rounding import double_copy, in_double, truth_of
from .make_runner import make_runner
from .network.early_exit_network import EarlyExitNetwork
from .own_exits.attach_exits import attach_exits
from .own_exits.silenced_model import SilencedModel
from .runners.runner import Runner

#: Seconds that the times before and after may take together, and how often each is measured.
_SECONDS, _FEWEST, _MOST = 2.0, 5, 50
_WARM_UP = 5
#: Probability below which no label is.
_LEAST = 1e-7


class Accelerated(Runner):
    """The runner that :func:`accelerate` made, with the network that it runs and a report; use it as that runner."""

    def __init__(self, runner: Runner, network: EarlyExitNetwork, report: str) -> None:
        """Hold a runner, which is closed with this one."""
        self.runner = runner
        """What answers; it is as fast by itself."""
        self.network = network
        """The :class:`EarlyExitNetwork` that it runs, by whose rules samples leave."""
        self.report = report
        """Lines of text: the exits, the runner, its answers, and times before and after."""

    def __call__(self, x: Tensor) -> ExitResult:
        """Answer for a batch like the example."""
        return self.runner(x)

    def describe(self) -> str:
        """Return the report, and what the runner says of itself."""
        return f"{self.report}\n{self.runner.describe()}"

    def refresh(self) -> None:
        """Take over parameters of the model that were changed in place."""
        self.runner.refresh()

    def close(self) -> None:
        """Free what the runner holds."""
        self.runner.close()

    def check_closable(self) -> None:
        """Raise what :meth:`close` would raise now."""
        self.runner.check_closable()

    def wait_until_idle(self) -> None:
        """Let the host wait for what the runner has launched."""
        self.runner.wait_until_idle()


def accelerate(
    model: nn.Module,
    example: Tensor,
    *,
    rules: ExitRule | float | Mapping[str, ExitRule | float] | None = None,
    final: Any = None,
) -> Accelerated:
    """Make the fastest runner for a model with early exits, check its answers and time it against the model.

    Args:
        model: returns the logits of several exits, or is a network of earlyon: see :func:`attach_exits`; or an
            :class:`EarlyExitNetwork`. In eval mode, and not changed: what is made of it shares its parameters.
        example: a batch like those to come, on the model's device. On a CUDA device the runner replays CUDA graphs, on
            others, and where no graph can hold the model, it is eager.
        rules: a threshold, a rule, or either by tap, as for :class:`EarlyExitNetwork`, into which they are written.
            None leaves those of a network, earlyon's too, and a model's exits never exit: all that is gained is faster
            launches.
        final: as for :func:`attach_exits`.

    Returns:
        Accelerated: call it as you would the runner, for an :class:`ExitResult`; its ``report`` says what was found and
        gained. Times are in microseconds, from the call on an idle device until the answer is there.

    Raises:
        ValueError, TypeError: as :func:`attach_exits` and :func:`make_runner` do.
        RuntimeError: the runner answers otherwise than the model by more than rounding.

    Example:
        >>> class TwoExits(nn.Sequential):
        ...     def forward(self, x):
        ...         x = self[0](x)
        ...         return self[1](x.mean((2, 3))), self[2](x.flatten(1))
        >>> model = TwoExits(nn.Conv2d(3, 8, 3), nn.Linear(8, 5), nn.Linear(8 * 36, 5)).eval()
        >>> fast = accelerate(model, torch.randn(2, 3, 8, 8), rules=0.0)
        >>> fast(torch.randn(2, 3, 8, 8)).exit_index
        tensor([0, 0])
    """
    check_module("model", model)
    check_batch("example", example)
    before: Callable[[Tensor], Any] = model
    if isinstance(model, EarlyExitNetwork):
        network = model
        if rules is not None:
            network.set_rules(rules)
        before, logits = model.logits, EarlyExitNetwork.logits
    else:
        network = attach_exits(model, example, rules=rules, final=final)
        if is_earlyon(model):
            from .own_exits.unhooked_exits import UnhookedExits  # which nobody else needs

            model = UnhookedExits(model)
        before = model
        logits = partial(_logits, network.backbone)
    runner = make_runner(network, example)
    try:
        near = _check_answers(runner, network, logits, model, example)
        times = _times([before, runner], example.clone())
        rules_now = [head.rule for head in network.exit_heads]
        may_leave = any(rule.enabled and rule.threshold < CRITERIA[rule.criterion].high for rule in rules_now)
        but = f", but for {near} within rounding of a threshold or a second label" if near else ""
        report = "\n".join(
            [
                _exits_line(network),
                *runner.describe().splitlines()[:1],
                f"Label and exit of the {len(example)} samples are what the rules make of the model's own logits{but}.",
                _gain(times, example),
                *([] if may_leave else ["Nobody leaves early: no rule lets a sample, wants rules=."]),
            ]
        )
    except BaseException:
        runner.close()
        raise
    return Accelerated(runner, network, report)


def _logits(backbone: nn.Module, model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the logits of a model's exits, but for a constant; of probabilities the logarithm, if they are not 0."""
    if not isinstance(backbone, SilencedModel):  # that of an earlyon network with heads that are fused whole
        return list(model(x))
    found = zip(backbone.answers_of(model, x), backbone.exits, strict=True)
    return [y.clamp_min(_LEAST).log() if one.softmax else y for y, one in found]


@torch.no_grad()
def _check_answers(
    runner: Runner,
    network: EarlyExitNetwork,
    logits: Callable[[Any, Tensor], list[Tensor]],
    model: nn.Module,
    x: Tensor,
) -> int:
    """Compare label and exit of each sample with what the rules make of the model's own logits.

    Returns:
        The number of samples that differ by rounding: near a threshold on the way, or between two labels.

    Raises:
        RuntimeError: other samples differ.
    """
    own = logits(model, x.clone())
    _, allowed = truth_of(own, lambda: logits(double_copy(model), in_double(x)))
    rules = [(one.rule.temperature_tensor, one.rule.threshold_tensor, one.rule.criterion) for one in network.exit_heads]
    answers = decide_in_order(own, rules)
    wanted, got = first_sure(answers, with_probs=False), runner(x.clone())
    slack = torch.stack([2.0 * allowed * y.abs().amax(1).float() for y in own])  # [exits, N], of logits
    near = torch.zeros_like(wanted.label, dtype=torch.bool)
    undecided = torch.zeros_like(near)  # between two labels, at any head so far
    for y, head, off, (temperature, threshold, criterion) in zip(
        own[:-1], answers[:-1], slack[:-1], rules, strict=True
    ):
        first, second = y.topk(min(2, y.shape[1]), dim=1).values[:, [0, -1]].unbind(1)
        undecided |= first - second <= 2.0 * off
        # Of that many logits, for an energy, and divided by the temperature for what is made of probabilities.
        allowance = off if CRITERIA[criterion].of_logits else off / temperature
        close = undecided if CRITERIA[criterion].counts_heads else (head.confidence - threshold).abs() <= allowance
        near |= close & (threshold < CRITERIA[criterion].high)
    at = got.exit_index.clamp(0, len(answers) - 1)[None, :, None].expand(1, -1, own[0].shape[1])
    there = torch.stack(own).gather(0, at)[0]  # logits [N, K] of the exit that answered
    best = there.gather(1, got.label[:, None])[:, 0]
    tied = there.amax(1) - best <= 2.0 * slack.amax(0)
    elsewhere = got.exit_index != wanted.exit_index
    differs = elsewhere | (got.label != wanted.label)
    wrong = int((differs & ~torch.where(elsewhere, near, tied)).sum())
    if wrong:
        raise RuntimeError(
            f"runner: label or exit of {wrong} of {len(x)} samples of the example differ from the model's by more than "
            f"rounding; {runner.describe()}"
        )
    return int(differs.sum())


@torch.no_grad()
def _times(calls: Sequence[Callable[[Tensor], Any]], x: Tensor) -> list[list[float]]:
    """Return the times of some calls in microseconds, measured in turns, until their answers are there."""

    def timed(call: Callable[[Tensor], Any]) -> float:
        began = time.perf_counter()
        kept = call(x)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        us = (time.perf_counter() - began) * 1e6
        del kept  # freed outside of the timed part
        return us

    for call in (_WARM_UP - 1) * [*calls]:
        timed(call)
    once = sum(timed(call) for call in calls) / 1e6
    rounds = max(_FEWEST, min(_MOST, int(_SECONDS / once)))
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds):
        for place in range(len(calls))[:: 1 if turn % 2 else -1]:
            times[place].append(timed(calls[place]))
    return times


def _exits_line(network: EarlyExitNetwork) -> str:
    if not isinstance(network.backbone, SilencedModel):
        return f"Exits: {', '.join(network.taps)}, and the backbone's own classifier."
    *early, last = network.backbone.exits
    found = []
    for one in early:
        how = ", ".join(word for word in (one.pool, one.how) if word not in ("", "none", None))
        found.append(f"{one.head or repr(one.place)} at {one.tap}" + (f" ({how})" if how else ""))
    late = [one.head or repr(one.place) for one in early if not one.skips]
    first = f"Nothing is skipped behind {', '.join(late)}: in brackets, why.\n" if late else ""
    return f"{first}Exits: {', '.join(found)}, and {last.head or repr(last.place)}, the model's own classifier."


def _gain(times: Sequence[Sequence[float]], x: Tensor) -> str:
    device = torch.cuda.get_device_name(x.device) if x.is_cuda else f"the {x.device.type.upper()}"
    tenths = [quantiles(each, n=10, method="inclusive") for each in times]
    before, after = (f"{each[4]:,.0f} us ({each[1]:,.0f}-{each[7]:,.0f})" for each in tenths)
    return (
        f"Before {before}, after {after}: {tenths[0][4] / tenths[1][4]:.2f} times as fast, for batches of {len(x)} on "
        f"{device}. Median (p20-p80) of {len(times[0])}, in turns; before is the model as it was in eval mode."
    )
