"""Runners and eager passes in any order that hypothesis draws, on any streams, of two threads, too: no races.

The order of the work is simulated on the CPU; see ``support/stream_order.py``.
"""

import gc
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import count
from typing import Any

import pytest
import torch
from auxhead.kernels import runs_triton
from auxhead.model import (
    CompactingRunner,
    EarlyExitNetwork,
    ExitResult,
    GatedRunner,
    OverlappedRunner,
    PolledRunner,
    make_runner,
)
from auxhead.model.runners import compacting
from auxhead.model.runners.graph_runner import GraphRunner
from auxhead.model.runners.runner import Runner
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support import stream_order
from support.example_models import SmallNet, plain_heads
from support.simulated_cuda import simulated_cuda
from support.stream_order import Event, OfOthers, OfPyTorch, Stream
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or not runs_triton(torch.empty(1)), reason="simulates CUDA, with Triton's interpreter"
)

WAYS = st.sampled_from(
    [
        (OverlappedRunner, {}),
        (OverlappedRunner, {"forks": SmallNet.taps[:2]}),
        (PolledRunner, {}),
        (GatedRunner, {}),
        (CompactingRunner, {}),
    ]
)
TRUNKS = st.sampled_from(["as_is", "cudnn", "that of the other runner"])
SIZES = st.sampled_from([(2,), (1, 3)])
STREAMS = st.integers(0, 2)
THRESHOLDS = st.sampled_from([0.0, 0.3, 0.4, 0.6, 1.0])
MOST_RUNNERS = 2
#: Of a thread, each with the number of what is called.
CALLS = st.tuples(st.sampled_from(["ask", "ask eagerly", "ask a head"]), st.integers(0, 1)) | st.just(("assign", 2))


class AnyOrder(RuleBasedStateMachine):
    """One network, up to two runners of it, and three streams, the last of which others make and destroy."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.stack.enter_context(simulated_cuda())
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        for name in ("_BUBBLE_US", "_MOVE_US"):  # every move pays
            patch.setattr(compacting, name, -1e6)
        self.compares = True
        torch.manual_seed(0)
        self.streams: list[OfPyTorch] = [OfPyTorch(), OfPyTorch(), OfOthers()]
        self.network = EarlyExitNetwork(SmallNet(), plain_heads(), 0.4).eval()
        self.runners: list[Runner] = []

    @initialize()
    def run_once(self) -> None:
        self.network(torch.randn(2, 3, 4, 4))

    def teardown(self) -> None:
        for runner in self.runners:
            runner.close()
        self.runners.clear()
        gc.collect()
        self.churn(0)
        self.stack.close()

    def on(self, stream: int) -> AbstractContextManager[None]:
        return stream_order.current(self.streams[stream])

    @precondition(lambda self: len(self.runners) < MOST_RUNNERS)
    @rule(stream=STREAMS, way=WAYS, sizes=SIZES, trunk=TRUNKS)
    def make(self, stream: int, way: tuple[type[GraphRunner], Any], sizes: tuple[int, ...], trunk: str) -> None:
        kind, options = way
        other = next((runner.trunk for runner in self.runners if isinstance(runner, GraphRunner)), None)
        given = (other or "cudnn") if trunk not in ("as_is", "cudnn") else trunk
        with self.on(stream):
            x = torch.randn(2, 3, 4, 4)
            self.runners.append(kind(self.network, x, batch_sizes=sizes, trunk=given, **options))
            x.zero_()

    @precondition(lambda self: len(self.runners) < MOST_RUNNERS)
    @rule(stream=STREAMS)
    def make_eager(self, stream: int) -> None:
        with self.on(stream):
            x = torch.randn(2, 3, 4, 4)
            self.runners.append(make_runner(self.network, x, exits="eager", trunk="cudnn"))
            x.zero_()

    @precondition(lambda self: self.runners)
    @rule(stream=STREAMS, which=st.integers(0, MOST_RUNNERS - 1), samples=st.integers(1, 4))
    def ask(self, stream: int, which: int, samples: int) -> None:
        with self.on(stream):
            x = torch.randn(samples, 3, 4, 4)
            kept = self.plain(x)
            answer = self.runners[which % len(self.runners)](x)
            x.zero_()  # at once
            self.is_right(answer, *kept)

    @rule(stream=STREAMS, stop=st.booleans())
    def ask_eagerly(self, stream: int, stop: bool) -> None:
        with self.on(stream):
            x = torch.randn(2, 3, 4, 4)
            kept = self.plain(x)
            answer = self.network(x, stop=stop)
            x.zero_()
            self.is_right(answer, *kept)

    @rule(stream=STREAMS, index=st.integers(0, 2))
    def ask_a_head(self, stream: int, index: int) -> None:
        head = self.network.fused_heads[index]
        with self.on(stream):
            x = torch.randn(2, SmallNet.widths[index], 2, 2)
            with _disable_current_modes(), torch.no_grad():
                confidence = head.logits(x).softmax(1).amax(1)
            answer = head(x)
            x.zero_()
            assert answer.label.add(answer.exit).shape == answer.confidence.shape
            if not self.compares:
                return
            with _disable_current_modes():
                torch.testing.assert_close(answer.confidence, confidence, rtol=1e-4, atol=1e-5)
                clear = (confidence - head.rule.threshold).abs() > 1e-4
                assert torch.equal(answer.exit[clear], (confidence > head.rule.threshold)[clear])

    @rule(stream=STREAMS, layer=st.sampled_from(["block1", "block2", "fc"]))
    def fail_eagerly(self, stream: int, layer: str) -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("of a hook")

        hook = getattr(self.network.backbone, layer).register_forward_pre_hook(fail)
        with self.on(stream):
            x = torch.randn(2, 3, 4, 4)
            with pytest.raises(RuntimeError, match="of a hook"):
                self.network(x)
            x.zero_()
        hook.remove()

    @precondition(lambda self: any(isinstance(runner, PolledRunner) for runner in self.runners))
    @rule(stream=STREAMS)
    def interrupt(self, stream: int) -> None:
        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        runner = next(runner for runner in self.runners if isinstance(runner, PolledRunner))
        with self.on(stream), pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(runner), "_poll", interrupted)
            x = torch.randn(2, 3, 4, 4)
            with pytest.raises(KeyboardInterrupt):
                runner(x)
            x.zero_()

    @rule(stream=STREAMS, tap=st.sampled_from(SmallNet.taps), threshold=THRESHOLDS)
    def assign(self, stream: int, tap: str, threshold: float) -> None:
        with self.on(stream):
            self.network.set_rules({tap: threshold})

    @rule(stream=STREAMS, refreshing=STREAMS, factor=st.sampled_from([-1.0, 0.5, 2.0]))
    def change_weights(self, stream: int, refreshing: int, factor: float) -> None:
        """Parameters are the caller's to order, folded ones ``refresh``'s."""
        torch.cuda.synchronize()
        with self.on(stream), torch.no_grad():
            self.network.backbone.block1[0].weight.mul_(factor)
        torch.cuda.synchronize()
        for runner in self.runners:
            with self.on(refreshing):
                runner.refresh()

    @precondition(lambda self: self.runners)
    @rule(stream=STREAMS, which=st.integers(0, MOST_RUNNERS - 1))
    def refresh(self, stream: int, which: int) -> None:
        """Fold what there is again, while requests may be under way."""
        with self.on(stream):
            self.runners[which % len(self.runners)].refresh()

    @rule(stream=STREAMS)
    def churn(self, stream: int) -> None:
        """Take memory that may have been given back just now."""
        with self.on(stream):
            torch.ones(3).add_(1)

    @rule(first=CALLS, second=CALLS, step=st.integers(0, 40), streams=st.permutations(range(3)))
    def call_in_two_threads(
        self, first: tuple[str, int], second: tuple[str, int], step: int, streams: Sequence[int]
    ) -> None:
        """Make the second call before one of the waits and records of the first."""
        if first == second and first[0] in ("ask", "assign"):
            return  # the second is refused, or waits
        steps = count()

        def meanwhile(call: Callable[..., object]) -> Callable[..., object]:
            def step_and_call(*given: object) -> object:
                if next(steps) == step:
                    with pytest.MonkeyPatch.context() as patch:
                        patch.setattr(threading, "get_ident", lambda: 0)
                        self.call(*second, streams[1])
                return call(*given)

            return step_and_call

        self.compares = "assign" not in (first[0], second[0])  # else it may be by either rule
        with pytest.MonkeyPatch.context() as patch:
            for kind, name in ((Stream, "wait_stream"), (Stream, "wait_event"), (Event, "record")):
                patch.setattr(kind, name, meanwhile(getattr(kind, name)))
            self.call(*first, streams[0])
        self.compares = True

    def call(self, kind: str, number: int, stream: int) -> None:
        if kind == "ask" and number < len(self.runners):
            self.ask(stream=stream, which=number, samples=2)
        elif kind == "ask eagerly":
            self.ask_eagerly(stream=stream, stop=bool(number))
        elif kind == "ask a head":
            self.ask_a_head(stream=stream, index=number)
        elif kind == "assign":
            self.assign(stream=stream, tap=SmallNet.taps[number], threshold=0.3)

    @rule()
    def destroy_a_stream(self) -> None:
        self.streams[2].gone = True
        self.streams[2] = OfOthers()

    @precondition(lambda self: self.runners)
    @rule(stream=STREAMS, closes=st.booleans())
    def end(self, stream: int, closes: bool) -> None:
        with self.on(stream):
            runner = self.runners.pop(0)
            if closes:
                runner.close()
            del runner
            gc.collect()

    def plain(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the confidences and the labels of all exits, [exits, N], computed in PyTorch."""
        with _disable_current_modes(), torch.no_grad():
            probs = torch.stack([logits.softmax(1) for logits in self.network.logits(x)])
            return probs.max(2)

    def is_right(self, answer: ExitResult, confidence: Tensor, label: Tensor) -> None:
        """Compare an answer on the stream that has asked for it."""
        assert answer.label.add(answer.exit_index).shape == answer.confidence.shape
        if not self.compares:
            return
        with _disable_current_modes():
            thresholds = torch.tensor([*(head.rule.threshold for head in self.network.fused_heads), -1.0])[:, None]
            clear = ((confidence - thresholds).abs() > 1e-4).all(0)
            exits = (confidence > thresholds).int().argmax(0)
            assert torch.equal(answer.exit_index[clear], exits[clear])
            assert torch.equal(answer.label[clear], label.gather(0, exits[None])[0][clear])
            torch.testing.assert_close(
                answer.confidence[clear], confidence.gather(0, exits[None])[0][clear], rtol=1e-4, atol=1e-5
            )


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=6, stateful_step_count=20)
