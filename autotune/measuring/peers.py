"""Peers that runners are compared with: heads as people write them, plain graphs, truncated networks, torch.compile."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...kernels import HeadOutput, decide
from ...model import EarlyExitNetwork, ExitResult, FusedAuxHead, Trunk
from ...model.basics.streams import stream_pair
from ...model.heads.head_pattern import module_of_activation
from ...model.listening.taps import ForwardLeft, listening
from .captured import CapturedFunction
from .eager_truth import merge


class PeerAnswer(NamedTuple):
    """The answer of a peer: its heads one by one, unmerged (which is in the peers' favour), and its last exit."""

    heads: Sequence[HeadOutput]
    last: Tensor | HeadOutput
    """Logits [N, K], or the answer of a fused head."""
    last_exit: int
    """Its exit index."""


class NaiveHead(nn.Module):
    """A head of six launches or more with the weights of a fused one: pool, flatten, linear, softmax, max, compare."""

    def __init__(self, head: FusedAuxHead) -> None:
        super().__init__()
        self.head = head
        pool = nn.AdaptiveMaxPool2d if head.pool == "max" else nn.AdaptiveAvgPool2d
        before, after = _layers_around_pool(head)
        self.classifier = nn.Sequential(*before, pool(head.pool_size), nn.Flatten(), *after, head.linear)

    def forward(self, x: Tensor) -> HeadOutput:
        """Answer for a map [N, C, H, W], or for whatever the fused head takes."""
        plain = x.ndim == 4 and self.head.pool in ("avg", "max")
        logits = self.classifier(x) if plain else self.head.logits(x)
        if self.head.rule.temperature != 1.0:
            logits = logits / self.head.rule.temperature_tensor
        confidence, label = torch.softmax(logits, dim=1).max(dim=1)
        return HeadOutput(None, label, confidence, confidence > self.head.rule.threshold_tensor)


def _layers_around_pool(head: FusedAuxHead) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return a fused head's layers before its pool, and those between flatten and its last linear layer."""
    hidden = head.hidden
    if hidden is None:
        return [], []
    after = [layer for _, layer in hidden.layers()]
    if hidden.linear is not None:
        after.append(module_of_activation(hidden.activation))
    return [nn.ReLU()] * hidden.rectifies, after


#: The heads of a network, naive or fused.
Heads = Sequence[Callable[[Tensor], Any]]


def _last(trunk: Trunk, y: Tensor) -> Tensor | HeadOutput:
    """Turn what the trunk's module returns into the answer of the last exit."""
    return y if trunk.classifier is None else trunk.classifier(y)


def bare(trunk: Trunk, taps: Sequence[str], x: Tensor) -> PeerAnswer:
    """Run the trunk without any head."""
    return PeerAnswer([], _last(trunk, trunk.module(x)), len(taps))


def in_line(
    trunk: Trunk, taps: Sequence[str], heads: Heads, x: Tensor,
    leaves: Callable[[int, HeadOutput], bool] = lambda index, answer: False,
) -> PeerAnswer:  # fmt: skip
    """Run every head on the stream of the trunk, and leave after the first one of which ``leaves`` says so."""
    answers: list[Any] = []

    def on_tap(index: int, y: Tensor) -> None:
        answers.append(heads[index](y))
        if leaves(index, answers[-1]):
            raise ForwardLeft

    try:
        with listening(trunk.module, taps, on_tap, trunk.reading):
            y = trunk.module(x)
    except ForwardLeft:
        return PeerAnswer(answers[:-1], answers[-1], len(answers) - 1)
    return PeerAnswer(answers, _last(trunk, y), len(taps))


def heads_alone(
    trunk: Trunk, taps: Sequence[str], heads: Heads, inputs: Sequence[Tensor]
) -> Callable[[Tensor], PeerAnswer]:
    """Return what runs heads one after another for one of the inputs, of which it keeps what the taps return."""
    with torch.no_grad():
        given: dict[int, Any] = {x.data_ptr(): in_line(trunk, taps, [lambda y: y] * len(taps), x) for x in inputs}

    def call(x: Tensor) -> PeerAnswer:
        there = given[x.data_ptr()]
        return PeerAnswer([head(y) for head, y in zip(heads, there.heads, strict=True)], there.last, there.last_exit)

    return call


def forked(trunk: Trunk, taps: Sequence[str], heads: Heads, x: Tensor) -> PeerAnswer:
    """Run every head on the low-priority stream; for a capture, which keeps what the side stream still reads."""
    main, side = torch.cuda.current_stream(x.device), stream_pair(x.device).side
    answers: list[Any] = []
    held: list[Tensor] = []

    def on_tap(index: int, y: Tensor) -> None:
        side.wait_stream(main)
        held.append(y)
        with torch.cuda.stream(side):
            answers.append(heads[index](y))

    with listening(trunk.module, taps, on_tap, trunk.reading):
        last = _last(trunk, trunk.module(x))
    main.wait_stream(side)
    return PeerAnswer(answers, last, len(taps))


def truncated(trunk: Trunk, taps: Sequence[str], heads: Heads, stop_at: int, x: Tensor) -> PeerAnswer:
    """Run up to a tap and let its head alone answer: a lower bound of what an exit there costs."""
    passing: Heads = [*[lambda y: None] * stop_at, heads[stop_at]]
    return in_line(trunk, taps, passing, x, lambda index, _answer: index == stop_at)._replace(heads=[])


def with_item(trunk: Trunk, taps: Sequence[str], heads: Heads, x: Tensor) -> PeerAnswer:
    """Ask the device after every head whether all samples are sure, and leave if so, as people write early exit."""
    sure: Tensor | None = None

    def leaves(_index: int, answer: HeadOutput) -> bool:
        nonlocal sure
        sure = answer.exit if sure is None else sure | answer.exit
        return bool(sure.all().item())

    return in_line(trunk, taps, heads, x, leaves)


class GraphedPeer(CapturedFunction[PeerAnswer]):
    """A peer in a CUDA graph of its own: copies the input in, replays, clones the last exit's answer.

    The clone is what the runners pay for as well: an answer that the next call does not write over.
    """

    def __call__(self, x: Tensor) -> PeerAnswer:
        """Answer for a batch like the example; answers of heads before the last exit are valid until the next call."""
        answer = super().__call__(x)
        last = answer.last
        if isinstance(last, Tensor):
            return answer._replace(last=last.clone())
        if last.probs is None:
            return answer._replace(last=last._replace(confidence=last.confidence.clone()))
        return answer._replace(last=last._replace(probs=last.probs.clone()))


def compiled(network: EarlyExitNetwork, heads: Sequence[NaiveHead], mode: str) -> Callable[[Tensor], PeerAnswer]:
    """Return the backbone through ``torch.compile``, which compiles at the first call; without ``heads`` the bare one.

    The modes "reduce-overhead" and "max-autotune" replay graphs too: answers of heads are valid until the next call.
    """
    # Not _HeadsInForward without heads: what is compiled for one is reused for the other, as hooks are not guarded.
    module = _HeadsInForward(network, heads) if heads else copy.deepcopy(network.backbone)
    run = torch.compile(module, mode=mode, dynamic=False)

    @torch.no_grad()
    def call(x: Tensor) -> PeerAnswer:
        torch.compiler.cudagraph_mark_step_begin()
        answers, logits = run(x) if heads else ([], run(x))
        if len(answers) != len(heads):  # samples that leave at the classifier would not show it
            raise RuntimeError(f"torch.compile left out heads: {len(answers)} of {len(heads)} answered")
        return PeerAnswer(answers, logits.clone(), len(network.taps))

    return call


class _HeadsInForward(nn.Module):
    """A backbone whose taps call their heads by permanent hooks: hooks set before compilation are compiled in."""

    def __init__(self, network: EarlyExitNetwork, heads: Sequence[NaiveHead]) -> None:
        super().__init__()
        self.backbone = copy.deepcopy(network.backbone)
        self.heads = nn.ModuleList(heads)
        self._answers: list[HeadOutput] = []
        for tap, head in zip(network.taps, heads, strict=False):
            self.backbone.get_submodule(tap).register_forward_hook(partial(self._on_tap, head))

    def _on_tap(self, head: NaiveHead, _module: nn.Module, _inputs: Any, y: Tensor) -> None:
        self._answers.append(head(y))

    def forward(self, x: Tensor) -> tuple[list[HeadOutput], Tensor]:
        logits = self.backbone(x)
        answers = list(self._answers)
        self._answers.clear()
        return answers, logits


def merged_answer(peer: PeerAnswer | ExitResult) -> ExitResult:
    """Merge the exits of a peer, or return a runner's answer; not part of what is timed."""
    if isinstance(peer, ExitResult):
        return peer
    last = peer.last
    if isinstance(last, Tensor):
        last = decide(last.double(), 1.0, 1.0)
    elif last.probs is not None:
        last = last._replace(confidence=last.probs.amax(dim=1))
    answer = merge([*peer.heads, last])
    at_last = answer.exit_index == len(peer.heads)
    return answer._replace(exit_index=answer.exit_index.masked_fill(at_last, peer.last_exit))
