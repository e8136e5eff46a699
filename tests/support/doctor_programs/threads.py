"""A branch that a thread of a pool runs: each thread has a current stream of its own, and has to enter the side one."""

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from .layers import Beside, OnCallersStream, narrow_input
from .program import Program, planted


class OfAThread(Beside):
    """The branch is launched by a thread of a pool; its tensors are held until the streams have joined."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = ThreadPoolExecutor(1)

    def run(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.first(x)
        self.side.wait_stream(self.trunk)
        submitted = self.submit(y)
        z = self.second(y)
        beside = submitted.result()
        self.trunk.wait_stream(self.side)
        beside.record_stream(self.trunk)
        return z, beside

    def submit(self, y: Tensor) -> Future[Tensor]:
        return self.pool.submit(self.launch, y)

    def launch(self, y: Tensor) -> Tensor:
        with torch.no_grad():  # each thread's own as well
            return self.branch(y)


class SubmittedWithin(OfAThread, OnCallersStream):
    """The thread that submits enters the side stream's block; the one that launches does not."""

    def submit(self, y: Tensor) -> Future[Tensor]:
        with torch.cuda.stream(self.side):
            return super().submit(y)


class Entering(OfAThread):
    """The thread that launches enters the block."""

    def launch(self, y: Tensor) -> Tensor:
        with torch.cuda.stream(self.side):
            return super().launch(y)


PROGRAMS: dict[str, Program] = {
    "threads_submitted_within": planted(lambda: (SubmittedWithin(), narrow_input()), "default-stream"),
    "threads_entering": Program(lambda: (Entering(), narrow_input())),
}
