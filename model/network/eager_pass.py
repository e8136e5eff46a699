"""One eager pass through a backbone and its heads, on the caller's stream: repeated launches on a GPU."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels import CRITERIA, HeadOutput, decide, in_order
from ...kernels.cuda.runtime import beside_captures, is_capturing, may_be_destroyed
from ..answers.exit_monitor import ExitMonitor
from ..answers.exit_result import ExitResult, first_sure
from ..answers.rule_order import wait_for_write
from ..basics.streams import current_handle, has_streams
from ..heads.fused_aux_head import FusedAuxHead
from ..heads.head import AuxHead, check_same_classes
from ..heads.repeats import Repeats, is_plain_call
from ..listening.batches import Batch, call_with, first_tensor
from ..listening.reading import Reading
from ..listening.taps import ForwardLeft, listening
from .exits_repeat import ExitsRepeat

#: Repeats of one network's exits by batch, stream and whether the host asks after each exit who is sure.
ExitsRepeats = Repeats[ExitsRepeat]


def find_repeat(
    repeats: ExitsRepeats,
    heads: Sequence[AuxHead],
    classifier: FusedAuxHead | None,
    x: Tensor,
    stream: int,
    *,
    at_each: bool,
    captured: bool,
    monitor: ExitMonitor | None,
) -> ExitsRepeat | None:
    """Return the repeat of a network's exits for a batch on the current stream, given by its handle, too; or None.

    The stream then comes after all writes to the heads' rules, unless it is being captured. A graph gets a repeat of
    its own, whose memory is the graph's: it may run beside others.
    """
    key = (stream, x.shape[0], x.device, at_each, classifier, monitor)
    exits: list[Any] = [*heads] if classifier is None else [*heads, classifier]
    if any(head._forward_hooks or head._forward_pre_hooks for head in exits):  # which a repeat would not call
        return None

    def made(_read: object) -> ExitsRepeat:
        return ExitsRepeat(
            [*(head.as_exit_head() for head in exits), *([None] if classifier is None else [])],
            x.shape[0],
            exits[0].num_classes,
            with_probs=all(head.return_probs for head in exits),
            at_each=at_each,
            device=x.device,
            tallies=None if monitor is None else monitor.tallies_on(x.device),
        )

    kept = None if captured else repeats.unchanged(key, exits, x)
    # Its launches share memory because one stream runs them one after another; the handle of one that its owner may
    # destroy might become that of another.
    if kept is None and (captured or not may_be_destroyed(torch.cuda.current_stream(x.device))):
        kept = repeats.make(exits, made, None if captured else key)
        if kept is not None and not captured:
            kept.wait_for_rules(exits, x)
    return None if kept is None else kept.repeat


@torch.no_grad()
def run_eagerly(
    backbone: nn.Module,
    taps: Sequence[str],
    heads: Sequence[AuxHead],
    x: Batch,
    *,
    classifier: FusedAuxHead | None = None,
    stop: bool = False,
    repeats: ExitsRepeats | None = None,
    monitor: ExitMonitor | None = None,
    reading: Reading | None = None,
) -> ExitResult:
    """Answer for a batch.

    With ``repeats``, on a CUDA device, exits are one launch behind the backbone, or with ``stop`` one each. Otherwise
    each head is called by itself. All runs on the caller's stream: Python mostly takes longer to launch a layer than a
    GPU to run it, so that there is little to gain beside it.

    Args:
        backbone: returns logits [N, K], or what ``classifier`` takes.
        taps: names of its layers.
        heads: one a tap.
        x: a batch that the backbone takes.
        classifier: the last exit, where it is no part of the backbone.
        stop: leave the forward as soon as every sample of the batch is sure. The host then waits for each head's
            decision, which is what an ``if confidence > t`` costs.
        repeats: of the network's exits, to be used again for the next batch.
        monitor: counts the answers.
        reading: how outputs of taps and of the backbone are read; None as they are.
    """
    y = x if isinstance(x, Tensor) else first_tensor(x)
    captured = has_streams(y) and is_capturing(y.device)
    # The network's memory, or its host, may wait for the device, beside another thread's capture too.
    with beside_captures() if has_streams(y) and not captured else nullcontext():
        one = _Pass(heads, classifier, stop=stop, monitor=monitor)
        if repeats is not None and has_streams(y) and _may_be_repeated(y):
            stream = current_handle(y.device)
            repeat = find_repeat(
                repeats, heads, classifier, y, stream, at_each=stop, captured=captured, monitor=monitor
            )
            if repeat is not None:
                one.repeat_on(repeat, stream, y.shape[0])
        final: Tensor | None = None
        try:
            with listening(backbone, taps, one.on_tap, reading):
                final = backbone(x) if y is x else call_with(backbone, x)
            if one.repeat is None and classifier is None and type(final) is Tensor:  # repeats check it
                check_same_classes(taps[0], heads[0].num_classes, final)
        except ForwardLeft:
            pass
        return one.answer(final)


def _may_be_repeated(x: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and is_plain_call(x)
        and torch.cuda.current_device() == x.device.index
    )


class _Pass:
    """One pass: what heads have answered, by repeated launches until an output is no plain tensor of their dtype."""

    repeat: ExitsRepeat | None = None

    def __init__(
        self,
        heads: Sequence[AuxHead],
        classifier: FusedAuxHead | None,
        *,
        stop: bool,
        monitor: ExitMonitor | None,
    ) -> None:
        self._heads, self._classifier, self._stop, self._monitor = heads, classifier, stop, monitor
        self._outputs: list[HeadOutput] = []  # of heads that were called
        self._merged = 0  # exits whose answers launches have merged, and counted

    def repeat_on(self, repeat: ExitsRepeat, stream: int, samples: int) -> None:
        """Answer by launches on the current stream, given by its handle, too."""
        self.repeat, self._stream, self._samples = repeat, stream, samples
        self._reads: list[Tensor] = []  # by the launches
        self._packed = repeat.new_answer()

    def on_tap(self, index: int, features: Tensor) -> None:
        """Call the head of a tap, or launch it if the forward may stop there; leave if all samples are sure."""
        head = self._heads[index]
        if self.repeat is None or self._outputs:
            self._call(head, features)  # in this place, where autocast may be on
            return
        read, dtype = head.launch_input(features), self.repeat.dtypes[index]
        if type(read) is not Tensor or (dtype is not None and read.dtype is not dtype):
            self._call_all()
            self._note(head.answer(read))
            self._leave_if_sure()
            return
        self._reads.append(read)
        if self._stop:
            self.repeat.launch(index, [read], self._packed, self._stream)
            self._merged = index + 1
            if self.repeat.all_are_sure(self._packed):
                raise ForwardLeft

    def _call(self, head: AuxHead, features: Tensor) -> None:
        self._note(head(features))
        self._leave_if_sure()

    def _call_all(self) -> None:
        """Go on head by head, beginning with those that launches would have answered for."""
        for head, read in zip(self._heads, self._reads, strict=False):
            self._note(head.answer(read))

    def _note(self, output: HeadOutput) -> None:
        """Keep what the next head answers, beside those before it."""
        self._outputs.append(output)
        rule = self._heads[len(self._outputs) - 1].rule
        if CRITERIA[rule.criterion].counts_heads:
            # read behind the same writes as by the head itself
            label = output.label
            read = None if torch.compiler.is_compiling() else wait_for_write(rule, label)
            self._outputs[-1] = in_order(self._outputs, rule.threshold_tensor, rule.criterion)
            if read is not None:
                read.record(torch.cuda.current_stream(label.device))

    def _leave_if_sure(self) -> None:
        if self._stop and bool(torch.stack([output.exit for output in self._outputs]).any(0).all()):
            raise ForwardLeft

    def answer(self, final: Tensor | None) -> ExitResult:
        """Return the answer, given what the backbone returned; None if the forward was left."""
        repeat = self.repeat
        if repeat is not None and not self._outputs:
            if final is None or type(final) is Tensor:
                if final is not None:
                    inputs = [final] if self._stop else [*self._reads, final]
                    repeat.launch(len(repeat.parts) - 1, inputs, self._packed, self._stream)
                return ExitResult.viewing(self._packed, repeat.layout, self._samples)
            self._call_all()
        outputs, classifier = [*self._outputs], self._classifier
        if final is not None:
            outputs.append(decide(final, temperature=1.0, threshold=1.0) if classifier is None else classifier(final))
        result = first_sure(outputs, with_probs=all(head.return_probs for head in self._heads))
        if self._monitor is not None:
            self._monitor.count(result.exit_index, result.confidence, merged=self._merged)
        return result
