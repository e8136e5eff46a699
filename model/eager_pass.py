"""One eager pass through a backbone and its heads: heads run beside it on a GPU, and their answers are merged."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from ..kernels import HeadOutput, decide
from ..kernels.cuda_runtime import beside_captures, is_capturing
from .exit_result import ExitResult, first_sure
from .fused_aux_head import FusedAuxHead
from .streams import StreamPair, fork_captured, has_streams, stream_pair
from .taps import ForwardLeft, listening


@torch.no_grad()
def run_eagerly(
    backbone: nn.Module,
    taps: Sequence[str],
    heads: Sequence[FusedAuxHead],
    x: Tensor,
    *,
    classifier: FusedAuxHead | None = None,
    in_line: bool = False,
    stop: bool = False,
) -> ExitResult:
    """Answer for a batch.

    On a CUDA device the backbone runs on a high-priority stream, and each head on a low-priority one as soon as its tap
    has returned. The caller's stream waits for both, so that results are used like any other tensors. On the CPU
    everything runs in line.

    Args:
        backbone: returns logits [N, K], or what ``classifier`` takes.
        taps: names of its layers.
        heads: one a tap.
        x: a batch that the backbone takes.
        classifier: the last exit, where it is no part of the backbone.
        in_line: keep the heads on the stream of the backbone.
        stop: leave the forward as soon as every sample of the batch is sure. The host then waits for each head's
            decision, which is what an ``if confidence > t`` costs.
    """
    with_probs = all(head.return_probs for head in heads)
    if not has_streams(x):
        return first_sure(_answers(backbone, taps, heads, x, classifier, None, in_line, stop), with_probs=with_probs)
    caller = torch.cuda.current_stream(x.device)
    if is_capturing(x.device):
        streams = fork_captured(caller)
        try:
            with torch.cuda.stream(streams.trunk), _own_casts(x):
                answers = _answers(backbone, taps, heads, x, classifier, streams, in_line, stop)
        finally:
            caller.wait_stream(streams.trunk)
        return first_sure(answers, with_probs=with_probs)
    with beside_captures():  # the network's memory, or its host, may wait for the device
        streams = stream_pair(x.device)
        streams.trunk.wait_stream(caller)  # and with it the side stream, at each tap
        try:
            with torch.cuda.stream(streams.trunk), _own_casts(x):
                answers = _answers(backbone, taps, heads, x, classifier, streams, in_line, stop)
        finally:
            caller.wait_stream(streams.trunk)  # which has waited for the side stream
        result = first_sure(answers, with_probs=with_probs)
        # The answers go back to the allocator now; another caller's run must not write over them before the merge, that
        # of another thread neither, whose next head has waited for the trunk already.
        streams.trunk.wait_stream(caller)
        streams.side.wait_stream(caller)
        return result


def _own_casts(x: Tensor) -> AbstractContextManager[object]:
    """Keep autocast from giving others the casts that it makes on the trunk's stream.

    It lets go of them when its block ends, and with them of the trunk's memory, whatever stream still reads them.
    """
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=False)


def _answers(
    backbone: nn.Module,
    taps: Sequence[str],
    heads: Sequence[FusedAuxHead],
    x: Tensor,
    classifier: FusedAuxHead | None,
    streams: StreamPair | None,
    in_line: bool,
    stop: bool,
) -> list[HeadOutput]:
    """Return what each exit says, up to the one at which the forward was left; the trunk's stream is current."""
    answers: list[HeadOutput] = []
    held: list[Tensor] = []  # the side stream may still read what the trunk has let go of
    sure: Tensor | None = None

    def on_tap(index: int, features: Tensor) -> None:
        nonlocal sure
        beside: AbstractContextManager[object] = nullcontext()
        if streams is not None and not in_line:
            streams.side.wait_stream(torch.cuda.current_stream(x.device))
            held.append(features)
            beside = torch.cuda.stream(streams.side)
        with beside:
            answers.append(heads[index](features))
            if stop:
                sure = answers[-1].exit if sure is None else sure | answers[-1].exit
                if bool(sure.all()):
                    raise ForwardLeft

    try:
        with listening(backbone, taps, on_tap):
            final = backbone(x)
    except ForwardLeft:
        return answers
    finally:
        if streams is not None:
            streams.trunk.wait_stream(streams.side)  # before `held` goes back to the trunk's memory
    return [*answers, decide(final, temperature=1.0, threshold=1.0) if classifier is None else classifier(final)]
