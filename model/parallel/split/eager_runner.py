"""``EagerSplitRunner``: parts of a network one after the other on CPUs, without streams or graphs."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ....kernels import HeadOutput, decide
from ....kernels.patience import with_patience
from ...early_exit_network import EarlyExitNetwork
from ...exit_result import ExitResult, first_sure
from ...module_head import AuxHead
from ..balance import median_ms
from ..segments import Segment, run_segments
from .part import Part
from .runner import SplitRunner


def eager_times(segments: Sequence[Segment], heads: Sequence[AuxHead], x: Tensor) -> list[float]:
    """Measure what each segment takes with its head for a batch, in microseconds."""
    taken = [(x,), *(handed for _, handed in run_segments(segments, x))]
    return [
        1e3 * median_ms(partial(_run, segment, head, of_segment))
        for segment, head, of_segment in zip(segments, [*heads, None], taken, strict=False)
    ]


def _run(segment: Segment, head: AuxHead | None, taken: Sequence[Tensor]) -> None:
    read = segment.module(*taken)[0]
    if head is None:
        decide(read, temperature=1.0, threshold=1.0)
    else:
        head(read)


class EagerSplitRunner(SplitRunner):
    """Runs segment by segment, in the order and with the copies of the devices: what is there where no GPU is."""

    def __init__(
        self,
        network: EarlyExitNetwork,
        parts: Sequence[Part],
        example_input: Tensor,
        sizes: Sequence[int],
        notes: str,
        *,
        stops: bool,
    ) -> None:
        """Run parts of a network; with ``stops`` no further than until all samples of a batch are answered."""
        super().__init__(network, parts, example_input, sizes, notes)
        self._stops = stops

    @torch.no_grad()
    def _request(self, x: Tensor, samples: int) -> ExitResult:
        self._heads.check_unchanged()
        return self._answer_in_parts(x, samples)

    def _answer_one(self, x: Tensor, size: int) -> ExitResult:
        samples = len(x)
        if samples < size:  # segments take no other number
            x = torch.cat([x, x[:1].expand(size - samples, *x.shape[1:])])
        said: list[HeadOutput] = []
        handed: Sequence[Tensor] = (x,)
        for part in self._parts:
            handed = [_copied_to(part.device, each) for each in handed]
            for index, segment in enumerate(part.segments[size]):
                read, *handed = segment.module(*handed)
                if index == len(part.heads):
                    said.append(decide(read, temperature=1.0, threshold=1.0))
                    break
                said.append(part.heads[index](read))
                rule = part.heads[index].rule
                if rule.criterion == "patience":
                    said[-1] = with_patience(said, rule.threshold_tensor)
                if self._stops and bool(torch.stack([one.exit[:samples] for one in said]).any(0).all()):
                    return self._merged(said, samples)
        return self._merged(said, samples)

    def _merged(self, said: Sequence[HeadOutput], samples: int) -> ExitResult:
        heads = self.network.exit_heads
        answer = first_sure(said, with_probs=all(head.return_probs for head in heads))
        answer = ExitResult(None if part is None else part[:samples] for part in answer)
        if self.network.monitor is not None:
            self.network.monitor.count(answer.exit_index, answer.confidence)
        return answer


def _copied_to(device: torch.device, x: Tensor) -> Tensor:
    """Return a copy of an activation on a device, a new one there, too."""
    return torch.empty_like(x, device=device).copy_(x)
