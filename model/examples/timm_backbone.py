"""timm backbone: heads on a frozen network of timm, trained alone on real images, and run.

Run it with ``python -m auxhead.model.examples.timm_backbone``. It wants timm (``pip install timm``) and scikit-learn,
whose package has the images.
"""

import torch
import torch.nn.functional as F
from auxhead.model import EarlyExitNetwork, FusedAuxHead, TrainingPlan, make_runner, train
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

#: Layers that a head can listen to; where one cannot, the error names those that can. In a ResNet, a RegNet or a
#: DenseNet maps [N, C, H, W] come out of every stage. A ViT has tokens [N, T, D]: tap "blocks.2" and its like, with
#: FusedAuxHead(None, classes, pool="first") for the class token.
TAPS = ("layer1", "layer2", "layer3")


def load_digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's 1,797 handwritten digits as images [N, 3, 16, 16], -1 to 1, and their labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    grey = torch.from_numpy(digits.images).float()[:, None] / 8.0 - 1.0  # [N, 1, 8, 8], from 0 to 16
    return F.interpolate(grey, size=16).expand(-1, 3, -1, -1).contiguous(), torch.from_numpy(digits.target)


def train_backbone(backbone: nn.Module, batches: DataLoader) -> None:
    """Go through the images twice, as whoever trained your backbone did more often."""
    optimizer = torch.optim.AdamW(backbone.parameters(), lr=0.005)
    for _ in range(2):
        for images, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(backbone(images), labels).backward()
            optimizer.step()


def main(device: str) -> None:
    """Attach heads, train them alone, and let images leave early."""
    try:
        import timm
    except ImportError:
        print("This example wants timm, which is not installed: pip install timm")
        return
    torch.manual_seed(0)
    images, labels = (part.to(device) for part in load_digits())

    batches = DataLoader(TensorDataset(images[:1_400], labels[:1_400]), batch_size=32, shuffle=True)

    # pretrained=True would fetch a trained backbone; a few steps of training stand in for it, so that this example
    # needs no network connection.
    backbone = timm.create_model("resnet10t", pretrained=False, num_classes=10).to(device)
    train_backbone(backbone, batches)

    # "heads": the network that you have stays as it is, and so does what its batch norms have learned. It runs over
    # the images once, and the heads learn from what it says of each.
    network = EarlyExitNetwork(backbone, {tap: FusedAuxHead(None, 10) for tap in TAPS}, example_input=images[:2])
    done = train(network, batches, TrainingPlan("heads", epochs=20, learning_rate=0.01))
    first, last = done.epochs[0].loss, done.epochs[-1].loss
    print(f"{len(TAPS)} heads: the mean of their losses fell from {first:.2f} to {last:.2f} nats")

    network.set_rules(0.8)  # `auxhead.model.calibrate_network` finds better ones: see train_save_load_run
    # On a GPU the fastest of what is measured on these images, within ten seconds; elsewhere the network as it is.
    with make_runner(network, images[:32]) as runner:
        answer = runner(images[1_400:])
        print(runner.describe())
    right = answer.label == labels[1_400:]
    print(f"{len(right)} images that were not trained on: {right.double().mean().item():.1%} right")
    for index, exit_name in enumerate([*TAPS, "classifier"]):
        print(f"  {int((answer.exit_index == index).sum()):>4} left at {exit_name}")


if __name__ == "__main__":
    main("cuda" if torch.cuda.is_available() else "cpu")
