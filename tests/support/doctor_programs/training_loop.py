"""A training loop whose profile is full of cudaLaunchKernel and cudaHostAlloc, and little else.

A script that stands alone: ``auxhead-tune doctor run training_loop.py``.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IMAGES, BATCH = 2048, 32


def make_network() -> nn.Module:
    """A network for CIFAR, small enough for its kernels to be shorter than their launches."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 32), (32, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


class Loop:
    """The state of the loop; a call is one step."""

    def __init__(self) -> None:
        self.network = make_network().to(DEVICE).train()
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.01, momentum=0.9, foreach=False)
        self.batches: list[Tensor] = []
        self.losses: list[float] = []

    @torch.enable_grad()
    def __call__(self, images: Tensor) -> None:
        labels = torch.randint(10, (len(images),))
        buffer = torch.empty(images.shape, pin_memory=torch.cuda.is_available())  # a new one each step,
        buffer.copy_(images)
        self.batches.append(buffer)  # since all of them are kept
        x = buffer.to(DEVICE)  # pinned, and waited for all the same
        y = labels.to(DEVICE)  # from pageable memory
        self.optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(self.network(x), y)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())  # waits for the whole step


def training_step() -> tuple[Loop, Tensor]:
    return Loop(), torch.randn(BATCH, 3, 32, 32)


def main(steps: int) -> None:
    torch.manual_seed(0)
    images = torch.randn(IMAGES, 3, 32, 32)
    loop = Loop()
    for step in range(steps):
        begin = step * BATCH % IMAGES
        loop(images[begin : begin + BATCH])
        print(f"step {step}: loss {loop.losses[-1]:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
