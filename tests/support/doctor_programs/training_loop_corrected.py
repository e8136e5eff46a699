"""A training loop without what keeps the GPU waiting: pinned once, copied without a wait, read every 100 steps.

A script that stands alone, as the one that it corrects.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH = 256 if torch.cuda.is_available() else 8
IMAGES = 4 * BATCH
READ_EVERY = 100


def make_network() -> nn.Module:
    """A network whose kernels are long, at this batch size."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 64), (64, 64), (64, 64), (64, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(64, 10, 1))


def pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


class Loop:
    """The state of the loop; a call is one step, for a batch that lies in pinned memory."""

    def __init__(self) -> None:
        self.network = make_network().to(DEVICE).train()
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.01, fused=True)
        self.labels = torch.randint(10, (BATCH,), device=DEVICE)
        self.loss = torch.zeros((), device=DEVICE)
        self.steps = 0

    @torch.enable_grad()
    def __call__(self, images: Tensor) -> None:
        x = images.to(DEVICE, non_blocking=True)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.network(x).mean((2, 3)), self.labels)
        loss.backward()
        self.optimizer.step()
        self.loss += loss.detach()
        self.steps += 1

    def read(self) -> float:
        """The mean loss of all steps since it was last read; waits for the GPU."""
        mean = self.loss.item() / self.steps
        self.loss.zero_()
        self.steps = 0
        return mean


def training_step() -> tuple[Loop, Tensor]:
    return Loop(), pinned(torch.randn(BATCH, 3, 64, 64))


def main(steps: int) -> None:
    torch.manual_seed(0)
    images = pinned(torch.randn(IMAGES, 3, 64, 64))
    loop = Loop()
    for step in range(steps):
        begin = step * BATCH % IMAGES
        loop(images[begin : begin + BATCH])
        if (step + 1) % READ_EVERY == 0 or step + 1 == steps:
            print(f"step {step}: loss {loop.read():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    main(parser.parse_args().steps)
