"""timm backbone: heads on a frozen network of timm, trained for a few steps on real images, and run.

Run it with ``python -m auxhead.model.examples.timm_backbone``. It wants timm (``pip install timm``) and scikit-learn,
whose package has the images.
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from auxhead.model import EarlyExitNetwork, FusedAuxHead, make_runner
from torch import Tensor

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


def train(parameters: Iterable[Tensor], loss_of: Callable[[Tensor], Tensor], steps: int) -> None:
    """Take steps on batches of 32 of the first 1,400 images; ``loss_of`` is given the indices of a batch."""
    optimizer = torch.optim.AdamW(parameters, lr=0.005)
    for step in range(steps):
        loss = loss_of(torch.randint(1_400, (32,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (0, steps - 1):
            print(f"  step {step + 1} of {steps}: loss {loss.item():.2f} nats")


def main(device: str) -> None:
    """Attach heads, train them alone, and let images leave early."""
    try:
        import timm
    except ImportError:
        print("This example wants timm, which is not installed: pip install timm")
        return
    torch.manual_seed(0)
    images, labels = (part.to(device) for part in load_digits())

    # pretrained=True would fetch a trained backbone; a few steps of training stand in for it, so that this example
    # needs no network connection.
    backbone = timm.create_model("resnet10t", pretrained=False, num_classes=10).to(device)
    print("backbone:")
    train(backbone.parameters(), lambda batch: F.cross_entropy(backbone(images[batch]), labels[batch]), steps=60)

    # Frozen: the network that you have stays as it is, and so do what its batch norms have learned, in train() too.
    backbone.eval().requires_grad_(False)
    network = EarlyExitNetwork(backbone, {tap: FusedAuxHead(None, 10) for tap in TAPS}, example_input=images[:2])

    def loss_of_heads(batch: Tensor) -> Tensor:
        *heads, _classifier = network.logits(images[batch])  # [32, 10] each
        return torch.stack([F.cross_entropy(logits, labels[batch]) for logits in heads]).mean()

    print(f"{len(TAPS)} heads, by the mean of their losses:")
    network.train()
    train(network.heads.parameters(), loss_of_heads, steps=60)
    network.eval()

    network.set_rules(0.8)  # `auxhead.model.calibrate` finds better ones: see train_save_load_run
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
