"""A branch that a thread of a pool runs: each thread has a current stream of its own, and has to enter the side one."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from .layers import Beside, OnCallersStream, narrow_input
from .program import Made, Program, planted


class SubmittedWithin(OnCallersStream):
    """The thread that submits enters the side stream's block; the one that launches does not."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = ThreadPoolExecutor(1)

    def run(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.first(x)
        self.side.wait_stream(self.trunk)
        with torch.cuda.stream(self.side):
            submitted = self.pool.submit(self.launch, y)
        z = self.second(y)
        beside = submitted.result()
        self.trunk.wait_stream(self.side)
        return z, beside

    def launch(self, y: Tensor) -> Tensor:
        with torch.no_grad():  # each thread's own as well
            return self.branch(y)


class Entering(Beside):
    """The thread that launches enters the block; the tensors are held until the streams have joined."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = ThreadPoolExecutor(1)

    def run(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.first(x)
        self.side.wait_stream(self.trunk)
        submitted = self.pool.submit(self.launch, y)
        z = self.second(y)
        beside = submitted.result()
        self.trunk.wait_stream(self.side)
        beside.record_stream(self.trunk)
        return z, beside

    def launch(self, y: Tensor) -> Tensor:
        with torch.no_grad(), torch.cuda.stream(self.side):
            return self.branch(y)


def submitted_within() -> Made:
    return SubmittedWithin(), narrow_input()


def entering() -> Made:
    return Entering(), narrow_input()


PROGRAMS: dict[str, Program] = {
    "threads_submitted_within": planted(submitted_within, "default-stream"),
    "threads_entering": Program(entering),
}
