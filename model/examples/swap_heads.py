"""Swap heads: a hand-written network with three exits gets fused heads, and gives the same answers.

Run it with ``python -m auxhead.model.examples.swap_heads``, on the CPU or on a GPU.
"""

import torch
from auxhead.model import FusedAuxHead, fuse_aux_heads
from torch import Tensor, nn

CLASSES = 10


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Return a convolution that halves height and width."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class PooledLinear(nn.Module):
    """A head class of one's own: it pools in its forward, where nobody but Python can see it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return probabilities [N, K] for a map [N, C, H, W]."""
        return self.fc(x.mean(dim=(2, 3))).softmax(dim=1)


class Net(nn.Module):
    """Three blocks with an exit behind each, as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.block1, self.block2, self.block3 = block(3, 32), block(32, 64), block(64, 128)
        self.exit1 = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES), nn.Softmax(dim=1))
        self.exit2 = PooledLinear(64)
        self.exit3 = nn.Sequential(nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(4 * 128, CLASSES), nn.Softmax(1))

    def forward(self, x: Tensor) -> list:
        """Return what each exit says."""
        x = self.block1(x)
        y = self.block2(x)
        z = self.block3(y)
        return [self.exit1(x), self.exit2(y), self.exit3(z)]


@torch.inference_mode()
def main(device: str) -> None:
    """Swap the heads, and compare what the network says with what it said before."""
    torch.manual_seed(0)
    model = Net().to(device).eval()
    images = torch.randn(8, 3, 64, 64).to(device)
    before = model(images)

    # In place. A head of a known shape becomes a FusedAuxHead that shares its parameters: nothing is copied, and
    # older state_dicts of the model load.
    report = fuse_aux_heads(model)
    print(f"swapped:    {', '.join(report.replaced)}")
    for name, reason in report.left_alone.items():
        print(f"left alone: {name} {reason}")

    # exit2 has a class of its own, whose forward nobody can read off its modules. You can: say in modules what it does,
    # around the very linear layer that it has, and put that in its place.
    its_steps = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), model.exit2.fc)
    model.set_submodule("exit2", FusedAuxHead.from_module(its_steps))
    print("swapped:    exit2, by hand")

    # A fused head answers more than probabilities: HeadOutput(probs, label, confidence, exit).
    after = model(images)
    for number, (probs, answer) in enumerate(zip(before, after, strict=True), start=1):
        difference = (probs - answer.probs).abs().max().item()
        assert torch.allclose(probs, answer.probs, atol=1e-5), f"exit{number} differs by {difference}"
        print(f"exit{number}: {len(images)} images, probabilities differ by at most {difference:.1e} from before")

    # Each has a rule. Its threshold lies in device memory: a captured graph would follow this change, too.
    threshold = after[0].confidence.median().item()
    report.replaced["exit1"].rule.threshold = threshold  # or model.exit1.rule.threshold
    answer = model(images)[0]
    print(
        f"exit1: {int(answer.exit.sum())} of {len(images)} images have a confidence above {threshold:.1%} and may leave"
    )


if __name__ == "__main__":
    main("cuda" if torch.cuda.is_available() else "cpu")
