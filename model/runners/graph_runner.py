"""``GraphRunner``: captures a network in CUDA graphs for some batch sizes: the base of the runners that replay them."""

import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from ...kernels import ExitBuffers, ExitHead
from ...kernels.cuda.lifetimes import MemoryPool
from ...kernels.cuda.runtime import beside_captures
from ..answers.exit_monitor import uncounted
from ..answers.exit_result import ExitResult
from ..answers.rule_order import note_reader, wait_for_writes
from ..basics.streams import CallersStream
from ..listening.batches import of_size
from ..listening.taps import list_taps, listening
from ..network.early_exit_network import EarlyExitNetwork
from ..trunk.trunk import Trunk, check_kind, make_trunk
from .capture import CAPTURE_LOCK
from .captured_network import CapturedNetwork
from .captures import Captures
from .checks import check_capturable, check_sizes
from .program import CapturedBatch, CapturedProgram, HeadLaunches, StaticInput, capture_program
from .runner import SerialRunner
from .segment_times import measure_segments

_T = TypeVar("_T")


class GraphRunner(SerialRunner):
    """Runs an :class:`EarlyExitNetwork` from CUDA graphs captured for a few batch sizes.

    Thresholds, temperatures and whether an exit is enabled may change at any time; parameters may change in place,
    followed by ``refresh``. A batch is padded to the next captured size, one above the largest is split. One request at
    a time: a call while another thread's is under way raises. What was captured is what runs: neither ``autocast`` nor
    hooks or modes of the backbone change a call, and heads that have changed are refused.
    """

    #: The trunk is captured on a stream of this priority. That of the heads is 0, the lowest there is, so that the
    #: trunk's waiting blocks are placed before theirs.
    trunk_priority = -1

    def __init__(
        self,
        network: EarlyExitNetwork,
        example_input: Tensor,
        *,
        batch_sizes: Sequence[int] = (1,),
        trunk: str | Trunk = "as_is",
        done: Sequence[float] | None = None,
    ) -> None:
        """Capture ``network``.

        Args:
            network: in eval mode, on a CUDA device. To run it in half precision cast it; it cannot be captured under
                autocast, which frees the weights that it has cast.
            example_input: a batch of any size on that device; requests have its dtype and the shape of its samples.
            batch_sizes: to capture.
            trunk: how the backbone is run, see :func:`make_trunk`; or what that has made of it.
            done: shares, 0 to 1, of batches all of whose samples have left by each tap: who can stop does so where that
                pays. None is by the shares that the network's monitor expects, as calibration leaves them there; where
                there is none, stops are wherever they may pay.

        Raises:
            ValueError, TypeError: an argument that does not fit.
            RuntimeError: the backbone cannot be captured, and the message names the layer; or autocast is on, or the
                current stream is being captured.
        """
        sizes = check_sizes(batch_sizes)
        if not isinstance(trunk, Trunk):
            check_kind("trunk", trunk)
        check_capturable(network, example_input, in_parts=isinstance(trunk, Trunk) and bool(trunk.parts))
        if done is not None and (len(done) != len(network.taps) or not all(0.0 <= share <= 1.0 for share in done)):
            raise ValueError(f"done: got {done!r:.100}, wants {len(network.taps)} shares, 0 to 1, one for each tap")
        super().__init__(network, example_input, sizes)
        self._done_by_tap = done
        self._heads = [head.as_exit_head() for head in network.exit_heads]
        self._classes = network.exit_heads[0].num_classes
        with_probs = all(head.return_probs for head in network.exit_heads)
        self._network_then = CapturedNetwork(network)
        with (
            CAPTURE_LOCK,
            beside_captures(),
            torch.cuda.device(self._device),
            torch.inference_mode(False),  # inference tensors could not be written to outside of it
            torch.no_grad(),
        ):
            caller = torch.cuda.current_stream(self._device)
            self._captures = captures = Captures(self._device, self.trunk_priority)
            try:
                weakref.finalize(self, captures.free_or_leave).atexit = False
                captures.streams.allocate_workspaces(captures.streams.side)  # modules and libraries call cuBLAS
                self._latest = CallersStream(caller)
                self._captured, self._done = captures.batches, captures.done
                self._trunk = (
                    trunk
                    if isinstance(trunk, Trunk)
                    else make_trunk(network.backbone, network.taps, example_input, trunk, network.reading)
                )
                self._written = [*(head.rule for head in network.exit_heads), *self._trunk.written]
                note_reader(self._written, self)
                wait_for_writes(self._written, caller)
                self._exits: list[ExitHead | None] = [
                    *self._heads,
                    None if self._trunk.classifier is None else self._trunk.classifier.as_exit_head(),
                ]
                monitor = network.monitor
                tallies = None if monitor is None else monitor.tallies_on(self._device)
                with uncounted(monitor):
                    for size in reversed(self._sizes):
                        example = of_size(example_input, size)
                        example = example.contiguous(memory_format=self._trunk.memory_format)
                        buffers = ExitBuffers.allocate(
                            len(self._exits), size, self._classes, with_probs=with_probs, device=self._device,
                            tallies=tallies,
                        )  # fmt: skip
                        with self._trunk.choosing(size):
                            self._captured[size] = self._capture(example, buffers)
            except BaseException:
                captures.free()
                raise
            self._done.record(caller)

    @property
    def last_reads(self) -> tuple[torch.cuda.Event, ...]:
        """The events behind the last request's reads of rules and weights."""
        self._captures.catch_up()
        return self._done, self._captures.unneeded

    @property
    def trunk(self) -> Trunk:
        """The trunk that was captured, for another runner to share."""
        self._refuse_closed()
        return self._trunk

    @abstractmethod
    def _capture(self, example: Tensor, buffers: ExitBuffers) -> CapturedBatch:
        """Capture the network for batches like the example, which stays as it is."""

    def _segment_times(self, example: Tensor) -> list[float]:
        """Measure what each segment of the trunk takes for a batch, without heads, in microseconds."""
        static, taps = self._static(example), range(len(self.network.taps))

        def forward(cut: Callable[[], None]) -> None:  # what it returned would be kept, with the pool it lies in
            self._run_trunk(static.read, taps, lambda _tap, _outputs: cut())

        program = self._capture_program(forward, static, MemoryPool(self._device))
        return measure_segments(program.graphs, static.refill, self._captures.streams.trunk)

    def _static(self, example: Tensor) -> StaticInput:
        """Make the memory of a batch that graphs read."""
        return StaticInput(example, self._trunk.memory_for(example))

    def _shares_done(self, size: int) -> Sequence[float] | None:
        """Return the shares of batches of a size that are done by each tap; None if nobody knows."""
        if self._done_by_tap is not None or self.network.monitor is None:
            return self._done_by_tap
        return [min(share, 1.0) ** size for share in accumulate(self.network.monitor.shares[:-1])]

    def _run_trunk(self, x: Tensor, stops: Sequence[int], at_stop: Callable[[int, list[Tensor]], None]) -> list[Tensor]:
        """Run the trunk once and return the outputs of all taps and, last, its own.

        As a tap returns whose index is in ``stops``, ``at_stop`` gets the number of the stop and all outputs so far.
        """
        outputs: list[Tensor] = []

        def on_tap(index: int, features: Tensor) -> None:
            outputs.append(features.resolve_neg())  # kernels read the memory as it is
            if index in stops:
                at_stop(stops.index(index), outputs)

        beside = self._captures.streams.branches if self._trunk.side_by_side else ()
        with listening(self._trunk.module, self.network.taps, on_tap, self._trunk.reading):
            outputs.append(self._trunk.run(x, beside).resolve_neg())
        return outputs

    def _compile(self, static: StaticInput, launches: HeadLaunches) -> None:
        """Compile launches side by side, before they warm up one after another; see :meth:`HeadLaunches.compile`."""
        if len(launches.launches) == 1 or not static.x.is_cuda:
            return
        stream = self._captures.streams.trunk
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            outputs = self._run_trunk(static.read, (), lambda _stop, _outputs: None)
            launches.compile(outputs, stream)  # modules of heads run on it, too
        stream.synchronize()

    def _capture_program(
        self, forward: Callable[[Callable[[], None]], _T], static: StaticInput, memory: MemoryPool
    ) -> CapturedProgram[_T]:
        """Capture a forward on the trunk's stream; see :func:`capture_program`."""
        modules = [self._trunk.module, self.network]
        program = capture_program(forward, static, [static.x], self._captures.streams.trunk, memory, modules)
        self._network_then.resizable |= program.resizable
        return program

    def _answer(self, captured: CapturedBatch, x: Tensor, caller: torch.cuda.Stream) -> ExitResult:
        captured.fill(x, caller)
        captured.graphs[0].launch(caller)
        return captured.copied_answer()

    def describe(self) -> str:
        """Say what was captured: the trunk, and for each batch size where heads run."""
        self._refuse_closed()
        heads = zip(self.network.taps, self.network.exit_heads, self._heads, strict=True)
        lines = [f"Head {tap}: {head.describe()}." for tap, head, launched in heads if launched.weight is None]
        lines = [*self._trunk.notes, *lines]
        places = (*self.network.taps, "the classifier")
        for size, captured in sorted(self._captured.items()):
            library, packed = (list_taps(heads, places) for heads in (captured.by_library, captured.packed))
            lines.append(f"Batch {size}: {captured.description}")
            if captured.by_library:
                lines[-1] += f" A library multiplies heads of {library}; a launch decides."
            if captured.packed:
                lines[-1] += f" A launch before pools, or puts in order, the features of heads of {packed}."
        return "\n".join(lines)

    def _refresh(self) -> None:
        self._trunk.refresh()

    def _free(self) -> None:
        super()._free()
        self._exits.clear()
        del self._trunk
