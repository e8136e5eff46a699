"""exit_launch.py on a GPU: launch after launch with other inputs, into memory that shows what was not written."""

import pytest
import torch
from auxhead.kernels import ExitBuffers, ExitHead, ExitLaunch, HeadOutput, fused_head
from support.head_cases import make_head
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

#: Shape of x and number of classes, for each way in which programs of a head find each other; and without a barrier of
#: Triton's own between deciding and merging.
HEADS = {
    "the last one of a sample adds up": ((5, 300, 9, 9), 200),
    "one of a sample waits": ((5, 30, 9, 9), 10),
    "others multiply for a sample": ((2, 48, 7, 7), 300),
    "others multiply for groups": ((33, 40, 9, 9), 1500),
    "others read packed features": ((20, 1024, 3, 3), 1500),
    "others read vectors": ((33, 600), 1500),
    "others find out about slices": ((33, 600), 5000),
    "alone": ((70, 60, 3, 3), 10),
    "four classes a thread": ((8, 512, 7, 7), 1000),
}
every_way = pytest.mark.parametrize("shape, classes", HEADS.values(), ids=HEADS)
one_or_more = pytest.mark.parametrize("count", [1, 3], ids=["one_head", "three_heads"])


def spoken(head: ExitHead, x: Tensor) -> HeadOutput:
    return fused_head(x, head.weight, head.bias, temperature=head.temperature, threshold=head.threshold)


class Case:
    """Heads of one launch, two sets of inputs in turn, and what the operator says of them."""

    def __init__(self, shape: tuple[int, ...], classes: int, count: int, **told: Tensor) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        parts = [make_head(shape, classes, dtype=torch.float16, device=device, seed=seed) for seed in range(2 * count)]
        self.inputs = [[x for x, _, _ in parts[:count]], [x for x, _, _ in parts[count:]]]
        one = torch.ones((), device=device)
        self.heads = [ExitHead(weight, bias, one, one.clone(), "avg", (1, 1)) for _, weight, bias in parts[:count]]
        for head, x in zip(self.heads, self.inputs[0], strict=True):
            head.threshold.copy_(spoken(head, x).confidence.quantile(0.7))
        self.outputs = [[spoken(*each) for each in zip(self.heads, xs, strict=True)] for xs in self.inputs]
        self.exits = [torch.stack([output.exit for output in outputs]) for outputs in self.outputs]
        self.open = [int((~exits.any(0)).sum()) for exits in self.exits]
        self.buffers = ExitBuffers.allocate(count + 1, shape[0], classes, with_probs=True, device=device)
        self.launch = ExitLaunch(self.buffers, 0, self.heads, **told)
        self.launch(self.inputs[0])  # compiles
        torch.cuda.synchronize()

    def poison(self) -> None:
        self.buffers.packed_answer.fill_(255)
        self.buffers.probs.fill_(float("nan"))
        self.buffers.label.fill_(-7)
        self.buffers.confidence.fill_(float("nan"))
        self.buffers.exits.fill_(False)

    def differences(self, packed: Tensor, turn: int) -> list[str]:
        """Names of those parts of an answer that are not what the operator's outputs come to."""
        label, exit_index, confidence, probs = self.buffers.answer(packed)
        closed = self.exits[turn].any(0)
        wanted = torch.where(closed, self.exits[turn].int().argmax(0), -1)
        wrong = ["exit"] * (not torch.equal(exit_index, wanted))
        for name, found in (("label", label), ("confidence", confidence), ("probs", probs)):
            right = torch.stack([getattr(output, name) for output in self.outputs[turn]])
            right = right[wanted[closed], closed.nonzero()[:, 0]]
            if not torch.allclose(found[closed], right, rtol=1e-4, atol=1e-6):
                wrong.append(name)
        return wrong


@one_or_more
@every_way
def test_inputs_in_turn(shape: tuple[int, ...], classes: int, count: int) -> None:
    """No launch takes a number of the one before, however late its warps are."""
    case = Case(shape, classes, count)
    kept = []
    for request in range(40):
        case.poison()
        case.launch(case.inputs[request % 2])
        kept.append(case.buffers.packed_answer.clone())
    torch.cuda.synchronize()
    wrong = {request: found for request, packed in enumerate(kept) if (found := case.differences(packed, request % 2))}
    assert not wrong


@one_or_more
@every_way
def test_the_answer_is_there_once_the_host_is_told(shape: tuple[int, ...], classes: int, count: int) -> None:
    """Another stream, which has waited for nothing, finds the whole answer."""
    told = torch.zeros(1, dtype=torch.int64).pin_memory()
    case = Case(shape, classes, count, open_samples=told)
    launching, reading = torch.cuda.Stream(), torch.cuda.Stream()
    number = int(case.buffers.requests)
    wrong = {}
    for request in range(40):
        case.poison()
        torch.cuda.synchronize()
        with torch.cuda.stream(launching):
            case.launch(case.inputs[request % 2])
        number += 1
        while int(told) >> 32 != number:
            pass
        with torch.cuda.stream(reading):
            packed = case.buffers.packed_answer.clone()
        reading.synchronize()
        if found := case.differences(packed, request % 2):
            wrong[request] = found
        assert int(told) & 0xFFFFFFFF == case.open[request % 2]
    assert not wrong
