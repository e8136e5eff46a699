"""One head by itself on a GPU: launched, captured as a chain of launches, and compared with the truth under overlap."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..kernels import HeadOutput, fused_head_reference
from ..kernels.head_shape import HeadShape
from ..kernels.head_view import HeadView, head_view
from ..kernels.launch_config import LaunchConfig
from ..model import FusedAuxHead
from ..model.streams import stream_pair

#: Launches of a head in one graph, one after the other.
CHAIN = 20
#: Launches that are compared while other work runs beside them.
_CHECKED_LAUNCHES = 5
#: Roundings of float32 that probabilities may be off by, however exact PyTorch's are by luck.
_FLOOR_ROUNDINGS = 4
#: The work beside them: products of square matrices.
_BUSY_SIZE = 2048
_BUSY_PRODUCTS = 50


class AloneHead:
    """A head and an input of it, on one CUDA device."""

    def __init__(self, head: FusedAuxHead, x: Tensor) -> None:
        """Launch ``head`` on ``x``, whatever its tables say."""
        self._head = head
        self._x = x
        self._device = x.device

    @property
    def view(self) -> HeadView:
        """The input as the kernel reads it."""
        return head_view(tuple(self._x.shape), self._x.stride(), self._head.pool, self._head.pool_size)

    @property
    def shape(self) -> HeadShape:
        """What tables know the head by."""
        pool_max = self._head.pool == "max"
        return HeadShape.of(self.view, self._head.num_classes, pool_max=pool_max, dtype=self._x.dtype)

    def launch(self, config: LaunchConfig) -> HeadOutput:
        """Launch on the current stream."""
        from ..kernels.fused_head_kernel import launch_fused_head  # there is no Triton for some platforms

        head, rule = self._head, self._head.rule
        return launch_fused_head(
            self._x, self.view, head.linear.weight, head.linear.bias, rule.temperature_tensor, rule.threshold_tensor,
            pool_max=head.pool == "max", return_probs=head.return_probs, config=config,
        )  # fmt: skip

    def chain(self, config: LaunchConfig) -> Callable[[], object]:
        """Capture launches one after another, and return what replays them."""
        stream = stream_pair(self._device).side
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.stream(stream):
            self.launch(config)  # counters are made ready outside of the capture
        torch.cuda.synchronize(self._device)
        with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
            for _ in range(CHAIN):
                self.launch(config)
        return graph.replay

    def wrong(self, config: LaunchConfig) -> str | None:
        """Say what is wrong with answers of launches beside other work, or return None."""
        exact, allowed = self._truth()
        assert exact.probs is not None
        with self._busy(), torch.no_grad():
            said = [self.launch(config) for _ in range(_CHECKED_LAUNCHES)]
        for out in said:
            off = (out.confidence.double() - exact.confidence).abs().max().item()
            if out.probs is not None:
                off = max(off, (out.probs.double() - exact.probs).abs().max().item())
            if not off <= allowed:  # NaN, too
                return f"probabilities are off by {off:.2g}, {allowed:.2g} being allowed"
            chosen = exact.probs.gather(1, out.label[:, None])[:, 0]
            if not bool((exact.confidence - chosen <= 2 * allowed).all()):
                return "a label is not that of the largest probability"
            if not (torch.equal(out.confidence, said[0].confidence) and torch.equal(out.label, said[0].label)):
                return "two launches on the same input differ"
        return None

    def _truth(self) -> tuple[HeadOutput, float]:
        """Return the answer in float64, and by how much probabilities may be off: twice as much as PyTorch's."""
        head, x = self._head, self._x
        bias = head.linear.bias
        with torch.no_grad():
            exact = fused_head_reference(
                x.double(), head.linear.weight.double(), None if bias is None else bias.double(),
                pool=head.pool, pool_size=head.pool_size,
                temperature=head.rule.temperature, threshold=head.rule.threshold,
            )  # fmt: skip
            own = torch.softmax(head.logits(x).double() / head.rule.temperature, dim=1)
        assert exact.probs is not None
        floor = _FLOOR_ROUNDINGS * torch.finfo(torch.float32).eps
        return exact, max(2.0 * (own - exact.probs).abs().max().item(), floor)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Let products of matrices run on the trunk's stream, and what is launched on the side stream."""
        streams = stream_pair(self._device)
        caller = torch.cuda.current_stream(self._device)
        for stream in streams:
            stream.wait_stream(caller)
        with torch.cuda.stream(streams.trunk):
            matrix = torch.ones(_BUSY_SIZE, _BUSY_SIZE, dtype=self._x.dtype, device=self._device)
            for _ in range(_BUSY_PRODUCTS):
                matrix @ matrix
        with torch.cuda.stream(streams.side):
            yield
        torch.cuda.synchronize(self._device)
