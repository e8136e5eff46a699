"""Two inputs: pictures and their motion, a stream of layers for each, heads on both streams and on what fuses them.

Run it with ``python -m auxhead.model.examples.two_streams``. Scikit-learn's handwritten digits move over a noisy
background; a picture is the second of two frames, its motion the difference of both, as optical flow would be. On a GPU
the streams run side by side.
"""

from typing import Any

import torch
from auxhead.model import EarlyExitNetwork, FusedAuxHead, TrainingPlan, calibrate_network, make_runner, train
from torch import Tensor, nn
from torch.utils.data import DataLoader, StackDataset

CLASSES, SIZE, EPOCHS = 10, 12, 10
#: Standard deviation of what is added to each frame's pixels, 0 to 1.
NOISE = 0.15


def stream(channels: int) -> nn.Module:
    """Return the layers of one input."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((channels, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers.append(nn.MaxPool2d(2, ceil_mode=True))
    return nn.Sequential(*layers[:-1])


class TwoStreams(nn.Module):
    """Both streams by themselves, and two layers for their maps together."""

    def __init__(self) -> None:
        super().__init__()
        self.pictures, self.motion = stream(1), stream(1)
        self.fusion = nn.Sequential(nn.Conv2d(128, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        self.classifier = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))

    def forward(self, pictures: Tensor, motion: Tensor) -> Tensor:
        """Return logits [N, 10] of pictures and motion, [N, 1, H, W] each."""
        return self.classifier(self.fusion(torch.cat([self.pictures(pictures), self.motion(motion)], 1)))


def move_digits(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return pictures and motion [M, 1, 12, 12], and labels [M]: digits that move by up to a pixel each way."""
    from sklearn.datasets import load_digits

    digits, drawn = load_digits(), torch.Generator().manual_seed(seed)
    images = torch.from_numpy(digits.images).float() / 16.0  # [M, 8, 8]
    labels = torch.from_numpy(digits.target)
    frames = NOISE * torch.randn(2, len(images), SIZE, SIZE, generator=drawn)
    places = torch.randint(1, SIZE - 8, (len(images), 2), generator=drawn)
    steps = torch.randint(-1, 2, (len(images), 2), generator=drawn)
    for index, (image, place, step) in enumerate(zip(images, places.tolist(), steps.tolist(), strict=True)):
        for frame, (y, x) in zip(frames, (place, [a + b for a, b in zip(place, step, strict=True)]), strict=True):
            frame[index, y : y + 8, x : x + 8] += image
    return frames[1, :, None], (frames[1] - frames[0])[:, None], labels


def batches_of(pictures: Tensor, motion: Tensor, labels: Tensor) -> DataLoader[Any]:
    """Return batches as dicts: the arguments of the network's forward by name, and labels."""
    data = StackDataset(pictures=pictures, motion=motion, labels=labels)  # type: ignore[arg-type]  # has items, too
    return DataLoader(data, 50, shuffle=True)


def main(device: str) -> None:
    """Train, calibrate and run."""
    torch.manual_seed(0)
    pictures, motion, labels = (each.to(device) for each in move_digits(0))
    learned, held_out, test = (slice(0, 1_000), slice(1_000, 1_400), slice(1_400, None))
    training, validation = (batches_of(pictures[part], motion[part], labels[part]) for part in (learned, held_out))
    heads = {tap: FusedAuxHead(None, CLASSES) for tap in ("pictures", "motion", "fusion")}
    network = EarlyExitNetwork(TwoStreams().to(device), heads, example_input=(pictures[:2], motion[:2]))
    plan = TrainingPlan(epochs=EPOCHS, learning_rate=5e-3)
    train(network, training, plan, on_epoch=lambda epoch: print(f"epoch {epoch.epoch + 1}: loss {epoch.loss:.2f} nats"))
    calibrate_network(network, validation, max_accuracy_drop=0.05, confidence=0.9)
    with make_runner(network, (pictures[:32], motion[:32])) as runner:
        answer = runner((pictures[test], motion[test]))
        print(runner.describe())
    truth = labels[test]
    right = answer.label == truth
    print(f"test: {len(truth)} pairs, {right.double().mean().item():.1%} right")
    for index, name in enumerate([*network.taps, "classifier"]):
        left = answer.exit_index == index
        print(f"  {int(left.sum()):>4} pairs left at {name}, {int((left & right).sum())} of them right")


if __name__ == "__main__":
    main("cuda" if torch.cuda.is_available() else "cpu")
