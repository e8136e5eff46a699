"""What the runners that replay CUDA graphs share: batch sizes, static buffers, checks, and the way in and out."""

import statistics
import threading
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ...kernels import ExitBuffers, ExitHead
from ..early_exit_network import EarlyExitNetwork
from ..exit_result import ExitResult, joined
from ..streams import current_handle
from ..taps import listening
from ..trunk.trunk import Trunk, make_trunk
from .capture import CAPTURES, Capture, CaptureStreams, warm_up
from .captured_batch import CapturedBatch
from .captured_heads import CapturedHeads
from .runner import Runner


class GraphRunner(Runner):
    """Runs an :class:`EarlyExitNetwork` from CUDA graphs captured for a few batch sizes.

    Thresholds, temperatures and whether an exit is enabled may change at any time; parameters may change in place,
    followed by ``refresh``. A batch is padded to the next captured size, one above the largest is split. One request at
    a time: a call while another thread's is under way raises. What was captured is what runs: neither ``autocast`` nor
    hooks or modes of the network change a call.
    """

    #: Of the stream that the trunk is captured on. That of the heads is 0, the lowest there is, so that the trunk's
    #: waiting blocks are placed before theirs.
    trunk_priority = -1

    def __init__(
        self,
        network: EarlyExitNetwork,
        example_input: Tensor,
        *,
        batch_sizes: Sequence[int] = (1,),
        trunk: str | Trunk = "as_is",
    ) -> None:
        """Capture ``network``.

        Args:
            network: in eval mode, on a CUDA device. To run it in half precision cast it; it cannot be captured under
                autocast, which frees the weights that it has cast.
            example_input: a batch of any size on that device; requests have its dtype and the shape of its samples.
            batch_sizes: to capture.
            trunk: how the backbone is run, see :func:`make_trunk`; or what that has made of it.

        Raises:
            ValueError, TypeError: an argument that does not fit.
            RuntimeError: the backbone cannot be captured, and the message names the layer; or autocast is on, or the
                current stream is being captured.
        """
        self._sizes = check_sizes(batch_sizes)
        check_capturable(network, example_input)
        self.network = network
        self._busy = threading.Lock()
        self._shape, self._dtype, self._device = example_input.shape[1:], example_input.dtype, example_input.device
        self._heads = [head.as_exit_head() for head in network.fused_heads]
        self._classes = network.fused_heads[0].num_classes
        self._with_probs = all(head.return_probs for head in network.fused_heads)
        self._captured_heads = CapturedHeads(network, self._heads)
        self._captured: dict[int, CapturedBatch] = {}
        with (
            CAPTURES,
            torch.cuda.device(self._device),
            torch.inference_mode(False),  # inference tensors could not be written to outside of it
            torch.no_grad(),
        ):
            self._last_stream = torch.cuda.current_stream(self._device)
            self._done = torch.cuda.Event()
            self._capture_streams = CaptureStreams(self._device, self.trunk_priority)
            self._trunk = (
                trunk if isinstance(trunk, Trunk) else make_trunk(network.backbone, network.taps, example_input, trunk)
            )
            # The graphs read this memory even if the network is given other memory, by to() or load_state_dict().
            self._memory = [
                (name, tensor, tensor.detach())
                for name, tensor in (*network.named_parameters(), *network.named_buffers())
            ]
            self._places: list[ExitHead | None] = [
                *self._heads,
                None if self._trunk.classifier is None else self._trunk.classifier.as_exit_head(),
            ]
            self._pool = torch.cuda.MemPool()
            try:
                for size in reversed(self._sizes):
                    repeats = -(-size // len(example_input))
                    x = torch.cat([example_input[:size]] * repeats)[:size]
                    x = x.contiguous(memory_format=self._trunk.memory_format)
                    with self._trunk.choosing(size):
                        self._captured[size] = self._capture(x, self._new_buffers(size))
            except BaseException:
                self._captured.clear()
                self._capture_streams.give_back()
                raise
            self._done.record(self._last_stream)

    @property
    def trunk(self) -> Trunk:
        """What runs under the heads, for a runner that takes this one's place."""
        return self._trunk

    def _new_buffers(self, size: int) -> ExitBuffers:
        return ExitBuffers.allocate(
            len(self._places), size, self._classes, with_probs=self._with_probs, device=self._device
        )

    @abstractmethod
    def _capture(self, x: Tensor, buffers: ExitBuffers) -> CapturedBatch:
        """Capture the network for the batch ``x``, which becomes the static input."""

    def _segment_times(self, x: Tensor) -> list[float]:
        """Measure what each segment of the trunk takes for the batch ``x``, without heads, in microseconds."""
        stream = self._capture_streams.pair.trunk

        def forward(capture: Capture | None) -> None:
            held: list[Tensor] = []

            def on_tap(_place: int, features: Tensor) -> None:
                held.append(features)
                if capture is not None:
                    capture.cut()

            with listening(self._trunk.module, self.network.taps, on_tap):
                self._trunk.module(x)

        warm_up(lambda: forward(None), stream)
        capture = Capture(self._device, self._pool)
        with capture.capturing(self._trunk.module, stream):
            forward(capture)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        times: list[list[float]] = [[] for _ in capture.graphs]
        for _ in range(5):
            for graph, found in zip(capture.graphs, times, strict=True):
                graph.launch(stream)
                start.record(stream)
                for _ in range(4):
                    graph.launch(stream)
                end.record(stream)
                end.synchronize()
                found.append(start.elapsed_time(end) * 1e3 / 4)
        return [statistics.median(found) for found in times]

    def _stops(self, x: Tensor, least_us: float) -> list[int]:
        """Choose the taps at which to stop when the batch ``x`` runs; see :func:`choose_stops`."""
        return choose_stops(self._segment_times(x), least_us)

    def _answer(self, captured: CapturedBatch, x: Tensor, caller: torch.cuda.Stream) -> ExitResult:
        """Answer for at most as many samples as were captured; ``caller`` is the current stream."""
        captured.fill(x)
        captured.graphs[0].launch(caller)
        return captured.copied_answer()

    def __call__(self, x: Tensor) -> ExitResult:
        """Answer for a batch [N, ...] on the CPU or on the network's device.

        The result is on the network's device, and ready for the caller's current stream. A batch in pinned memory is
        read when that stream gets there: do not write to it before the result is there.

        Raises:
            ValueError, TypeError: a shape, device or dtype other than that of the example input; nothing is launched.
            RuntimeError: the runner is closed, or in another thread's call; or the current stream is being captured;
                nothing is launched. Or a head's tensors are no longer those that were captured; what was launched has
                read the captured ones, and its answer is thrown away.
        """
        self._refuse_while_busy()
        with self._busy:
            self._refuse_closed()
            samples = self._check(x)
            if torch.cuda.current_device() != self._device.index:
                with torch.cuda.device(self._device):
                    answer = self._run(x, samples)
            else:
                answer = self._run(x, samples)
            self._captured_heads.refuse_others()  # while the device works: before the launch it would delay the answer
            return answer

    def _run(self, x: Tensor, samples: int) -> ExitResult:
        _refuse_outer_capture()
        caller = self._last_stream
        if current_handle(self._device) != caller.cuda_stream:
            caller = torch.cuda.current_stream(self._device)
            caller.wait_event(self._done)  # the last request may still use the buffers
        if x.requires_grad:
            x = x.detach()
        largest = self._sizes[-1]
        try:
            if samples <= largest:
                return self._answer(self._captured_for(samples), x, caller)
            parts = x.split(largest)
            return joined([self._answer(self._captured_for(len(part)), part, caller) for part in parts])
        finally:  # after an error, too: what has been launched uses the buffers
            self._last_stream = caller
            self._done.record(caller)

    def _captured_for(self, samples: int) -> CapturedBatch:
        """Return the smallest that holds so many samples."""
        return self._captured[self._sizes[bisect_left(self._sizes, samples)]]

    def _refuse_while_busy(self) -> None:
        # The lock is taken by `with`, which no interrupt leaves held; by `acquire` and `try` two of a hundred did.
        if self._busy.locked():
            raise RuntimeError("this runner is in another thread's call; give each thread a runner of its own")

    def _refuse_closed(self) -> None:
        if not self._captured:
            raise RuntimeError("this runner is closed")

    def _check(self, x: Tensor) -> int:
        """Return the number of samples; of what is asked for at each request, the cheapest that tells."""
        if not isinstance(x, Tensor):
            raise TypeError(f"x: got {type(x).__name__}, wants a torch.Tensor")
        shape = x.shape
        if not shape or shape[1:] != self._shape or not shape[0]:
            raise ValueError(f"x: got shape {list(shape)}, wants [N, {', '.join(map(str, self._shape))}] and N >= 1")
        if x.dtype != self._dtype:
            raise TypeError(f"x: got {x.dtype}, wants {self._dtype}, the dtype of the example input")
        if x.device != self._device and not x.is_cpu:
            raise ValueError(f"x: got device {x.device}, wants {self._device} or the CPU")
        return shape[0]

    def describe(self) -> str:
        """Say what was captured: the trunk, and for each batch size where heads run."""
        lines = [*self._trunk.notes]
        lines += [f"Batch {size}: {self._captured[size].description}" for size in sorted(self._captured)]
        return "\n".join(lines)

    def refresh(self) -> None:
        """Take over parameters of the backbone that were changed in place, where the trunk holds copies of them.

        Raises:
            RuntimeError: a parameter or buffer of the network is no longer the one that was captured, but lies in other
                memory; or the runner is closed, or in another thread's call.
        """
        self._refuse_while_busy()
        with self._busy:
            self._refuse_closed()
            self._refresh()

    def _refresh(self) -> None:
        now = dict((*self.network.named_parameters(), *self.network.named_buffers()))
        for name, tensor, captured in self._memory:
            if now.get(name) is not tensor or tensor.data_ptr() != captured.data_ptr():
                raise RuntimeError(
                    f"network: {name} was given other memory since the capture; copy into it, or make a new runner"
                )
        with torch.cuda.device(self._device):
            caller = torch.cuda.current_stream(self._device)
            if caller != self._last_stream:
                caller.wait_event(self._done)  # the last request may still read the copies
            self._trunk.refresh()
            self._last_stream = caller
            self._done.record(caller)

    def close(self) -> None:
        """Wait for what is under way and free graphs and memory; a later call raises. Closing twice is fine."""
        with self._busy:
            if self._captured:
                self._wait()
                self._captured.clear()
                self._memory.clear()
                self._places.clear()
                del self._pool, self._trunk
                self._capture_streams.give_back()

    def _wait(self) -> None:
        """Wait for what is under way, and for nothing else: a wait for the device would break another's capture."""
        self._done.synchronize()

    def __del__(self) -> None:  # memory that graphs under way write must not be handed out again
        if getattr(self, "_captured", None):
            try:
                self.close()
            except Exception:  # the device is lost, or the process ends
                pass


def check_capturable(network: EarlyExitNetwork, example_input: Tensor) -> None:
    """Raise what :class:`GraphRunner` does for a network or example that cannot be captured, and check the taps."""
    if not (isinstance(example_input, Tensor) and example_input.ndim > 0 and len(example_input)):
        raise ValueError("example_input: wants a tensor [N, ...] of at least one sample")
    _check_cuda(example_input)
    if any(module.training for module in network.modules()):
        raise ValueError("network: in training mode, wants network.eval()")
    for tap, head in zip(network.taps, network.fused_heads, strict=True):
        if is_parametrized(head.linear):
            raise ValueError(
                f"heads[{tap!r}]: its linear layer is parametrized, which a graph would not follow; wants none: call "
                "torch.nn.utils.parametrize.remove_parametrizations, or use 'eager'"
            )
    _check_device(network.backbone, example_input.device)
    if torch.is_autocast_enabled("cuda"):
        raise RuntimeError("a runner cannot capture under autocast; leave it and cast the network, or use 'eager'")
    _refuse_outer_capture()
    network.check_taps(example_input)
    _check_device(network, example_input.device)


def check_sizes(batch_sizes: Sequence[int]) -> list[int]:
    """Return the batch sizes to capture, in ascending order; raises ``ValueError`` or ``TypeError``."""
    try:
        sizes = list(batch_sizes)
    except TypeError:
        raise TypeError(f"batch_sizes: got {batch_sizes!r}, wants a sequence of positive ints") from None
    if not sizes or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise ValueError(f"batch_sizes: got {sizes}, wants positive ints")
    return sorted(set(sizes))


def choose_stops(segment_us: Sequence[float], least_us: float) -> list[int]:
    """Choose the taps at which to stop: as many as can be, with at least ``least_us`` of the trunk after each."""
    stops: list[int] = []
    left = 0.0
    for place, us in reversed(list(enumerate(segment_us[1:]))):
        left += us
        if left >= least_us:
            stops.insert(0, place)
            left = 0.0
    return stops


def _check_cuda(example_input: Tensor) -> None:
    if example_input.device.type != "cuda":
        raise ValueError(f"example_input: on {example_input.device}, wants a CUDA device; elsewhere use 'eager'")


def _check_device(network: nn.Module, device: torch.device) -> None:
    for name, parameter in network.named_parameters():
        if parameter.device != device:
            raise ValueError(f"network: {name} is on {parameter.device}, wants {device} as the example input")


def _refuse_outer_capture() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the current stream is being captured, and a runner replays graphs of its own: call it outside of the "
            "capture, or capture a call of the network"
        )


def listed(places: Sequence[int], taps: Sequence[str]) -> str:
    """Name the taps at some places."""
    return ", ".join(taps[place] for place in places)
