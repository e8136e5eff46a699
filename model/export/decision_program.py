"""The answer for one sample as a program of ``torch.export``: stages of a network, a ``torch.cond`` at each exit."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from ...kernels import CRITERIA, HeadOutput, decide
from ...kernels.reference.merge import heads_in_a_row
from ..basics.bad_input import BadInput
from ..heads.head import AuxHead
from ..listening.batches import Batch, call_with, tensors_by_name
from ..listening.taps import listening
from ..network.early_exit_network import EarlyExitNetwork
from .program import cut_into_stages, logits_program, one_line_of_exporter


class Rules(NamedTuple):
    """The numbers of all heads' rules: buffers of a .pt2 file, and inputs of an .onnx file that may be left out."""

    thresholds: Tensor  # [heads] float32
    temperatures: Tensor  # [heads] float32
    enabled: Tensor  # [heads] int64, 1 or 0; of one byte a buffer would be a bytes object that all of Python shares

    @classmethod
    def of(cls, network: EarlyExitNetwork, device: torch.device) -> "Rules":
        """Return those of a network."""
        rules = [head.rule for head in network.exit_heads]
        return cls(
            torch.tensor([rule.threshold for rule in rules], dtype=torch.float32, device=device),
            torch.tensor([rule.temperature for rule in rules], dtype=torch.float32, device=device),
            torch.tensor([int(rule.enabled) for rule in rules], device=device),
        )

    def forcing(self, exit_index: int) -> "Rules":
        """Return rules under which a sample leaves at an exit, whatever its confidence."""
        heads = torch.arange(len(self.thresholds), device=self.thresholds.device)
        return self._replace(
            thresholds=torch.full_like(self.thresholds, -torch.inf), enabled=(heads == exit_index).long()
        )


class Counted(NamedTuple):
    """How many heads in a row gave a label, and which, as ``heads_in_a_row`` returns them."""

    heads: Tensor  # [1]
    label: Tensor  # [1]


class StageInput(NamedTuple):
    """A tensor that a stage takes."""

    shape: torch.Size
    is_shared: bool
    """It lies in the memory of another one beside it, as views do; a branch may not be given both."""


@torch.no_grad()
def _inputs_of(stages: Sequence[fx.GraphModule], sample: Sequence[Tensor]) -> list[list[StageInput]]:
    """Return what each stage takes when the first is given a sample."""
    found, given = [], [each.clone() for each in sample]
    for stage in stages:
        places = [each.untyped_storage().data_ptr() for each in given]
        found.append(
            [StageInput(x.shape, place in places[:i]) for i, (x, place) in enumerate(zip(given, places, strict=True))]
        )
        _, *given = stage(*given)
    return found


class GivenRules(nn.Module):
    """The answer for one sample under rules that it is given behind the sample: stage after stage until one is sure."""

    def __init__(
        self, stages: Sequence[fx.GraphModule], sample: Sequence[Tensor], criteria: Sequence[str], *, with_probs: bool
    ) -> None:
        """Answer by the stages' exits, by these criteria; the ``sample`` tells what is handed from stage to stage."""
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self._inputs = _inputs_of(stages, sample)
        self._criteria = tuple(criteria)
        self._with_probs = with_probs
        self._counts = any(CRITERIA[criterion].counts_heads for criterion in criteria)

    def forward(self, *sample_and_rules: Tensor) -> tuple[Tensor, ...]:
        """Return label, confidence, probs, unless they are left out, and exit index, [1] or [1, K]."""
        sample, rules = sample_and_rules[: -len(Rules._fields)], Rules(*sample_and_rules[-len(Rules._fields) :])
        return self.answer(rules, 0, None, *sample)

    def answer(self, rules: Rules, index: int, counted: Counted | None, *handed: Tensor) -> tuple[Tensor, ...]:
        """Answer by the exits from this one on, given what the stage before has handed over."""
        # A branch takes sizes for unknown: what is computed of them, as entropy's largest is of the number of classes,
        # would be of other sizes.
        handed = tuple(x.reshape(one.shape) for x, one in zip(handed, self._inputs[index], strict=True))
        logits, *hands = self.stages[index](*handed)
        if index == len(self._criteria):
            return self._parts(decide(logits, temperature=1.0, threshold=1.0), index)
        hands = [x.clone() if one.is_shared else x for x, one in zip(hands, self._inputs[index + 1], strict=True)]
        output, counted = self._judged(logits, rules, index, counted)
        here = self._parts(output, index)

        def stay(*operands: Tensor) -> tuple[Tensor, ...]:
            return tuple(part.clone() for part in operands[: len(here)])  # a branch may not return what it is given

        def go_on(*operands: Tensor) -> tuple[Tensor, ...]:
            left = operands[len(here) :]
            if counted is None:
                return self.answer(rules, index + 1, None, *left)
            return self.answer(rules, index + 1, Counted(*left[:2]), *left[2:])

        sure = (output.exit & (rules.enabled[index] != 0)).reshape(())
        found: tuple[Tensor, ...] = torch.cond(sure, stay, go_on, (*here, *(counted or ()), *hands))
        return found

    def _judged(
        self, logits: Tensor, rules: Rules, index: int, counted: Counted | None
    ) -> tuple[HeadOutput, Counted | None]:
        criterion, threshold = self._criteria[index], rules.thresholds[index]
        output = decide(logits, rules.temperatures[index], threshold, criterion)
        if not self._counts:
            return output, None
        if counted is None:
            counted = Counted(torch.zeros_like(output.confidence), torch.full_like(output.label, -1))
        counted = Counted(*heads_in_a_row(*counted, output))
        if CRITERIA[criterion].counts_heads:
            confidence = torch.where(output.confidence.isnan(), output.confidence, counted.heads)
            output = output._replace(confidence=confidence, exit=confidence > threshold)
        return output, counted

    def _parts(self, output: HeadOutput, index: int) -> tuple[Tensor, ...]:
        assert output.probs is not None
        probs = (output.probs,) if self._with_probs else ()
        return output.label, output.confidence, *probs, torch.full_like(output.label, index)


class OwnRules(nn.Module):
    """The answer for one sample under rules in buffers, which whoever has loaded the file reads and changes."""

    thresholds: Tensor
    temperatures: Tensor
    enabled: Tensor

    def __init__(self, given: GivenRules, rules: Rules) -> None:
        super().__init__()
        self.exits = given
        for name, value in rules._asdict().items():
            self.register_buffer(name, value)

    def forward(self, *sample: Tensor) -> tuple[Tensor, ...]:
        """Return what :class:`GivenRules` does."""
        return self.exits.answer(Rules(self.thresholds, self.temperatures, self.enabled), 0, None, *sample)


def decision_program(
    network: EarlyExitNetwork, sample: Batch, rules: Rules, *, rules_given: bool
) -> tuple[ExportedProgram, tuple[Tensor, ...]]:
    """Return the program of a network's answer for one sample, and the inputs that it was made with.

    With ``rules_given`` the program takes the rules behind the tensors of the sample, else it has them as buffers.
    ``BadInput`` if torch.export cannot make it; of a head it names the tap.
    """
    tensors = tuple(tensors_by_name(sample).values())
    with naming_heads(network, sample, lambda head, features: torch.export.export(head, (features,))):
        stages = cut_into_stages(logits_program(network, sample).module())
    criteria = [head.rule.criterion for head in network.exit_heads]
    with_probs = all(head.return_probs for head in network.exit_heads)
    given = GivenRules([stage.module for stage in stages], tensors, criteria, with_probs=with_probs)
    module, inputs = (given, (*tensors, *rules)) if rules_given else (OwnRules(given, rules), tensors)
    with one_line_of_exporter("network: torch.export cannot export its decision"):
        program = torch.export.export(module, inputs)
    _forget_sources(program.graph_module)
    return program, inputs


def _forget_sources(module: fx.GraphModule) -> None:
    """Drop where each operation comes from: of branches within branches that is most of a file, with paths in it."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                node.meta.pop("stack_trace", None)


class _Logits(nn.Module):
    """The logits of one head as a forward."""

    def __init__(self, head: AuxHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.head.logits(x)


@contextmanager
def naming_heads(
    network: EarlyExitNetwork, sample: Batch, export: Callable[[nn.Module, Tensor], object]
) -> Iterator[None]:
    """Let a ``BadInput`` that a network cannot be exported name the first head that alone cannot be."""
    try:
        yield
    except BadInput:
        features: list[Tensor] = []
        with (
            torch.no_grad(),
            listening(
                network.backbone, network.taps, lambda _, y: features.append(y.clone()), network.reading_for(sample)
            ),
        ):
            call_with(network.backbone, sample)
        for tap, head, read in zip(network.taps, network.exit_heads, features, strict=True):
            with one_line_of_exporter(f"heads[{tap!r}]: its {type(head).__name__} cannot be exported"):
                export(_Logits(head).eval(), read)
        raise
