"""Modules that are trained, ``AllExits`` and ``HeadsOnFeatures``; features computed once, and accuracies of exits."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..basics.arguments import is_wrapped, tensor_in_words
from ..basics.bad_input import BadInput
from ..heads.head import AuxHead, check_followed
from ..listening.batches import Batch, call_with, tensors_by_name
from ..listening.kept import modes_kept
from ..listening.taps import listening
from ..network.early_exit_network import EarlyExitNetwork
from .batches import ShuffledBatches, all_finite, all_on_device
from .data_sets import MOST_BYTES

#: What to do with a network that has no room on one device.
_INSTEAD = (
    "to train what does not fit on one device, shard its backbone by torch.distributed.fsdp.fully_shard, take plain "
    "steps, joint_loss(network.logits(images), labels).backward(), save_checkpoint what was learned, and split what "
    "load_checkpoint returns, as the guide several_gpus.md does"
)


def check_on_one_device(network: EarlyExitNetwork) -> None:
    """Raise ``BadInput`` if some parameter is on another device than the first one, or on meta: a split network."""
    first: tuple[str, torch.device] | None = None
    for name, parameter in network.named_parameters():
        first = first or (name, parameter.device)
        if parameter.is_meta or parameter.device != first[1]:
            others = "" if first[0] == name else f", and {first[0]} on {first[1]}"
            raise BadInput(
                f"network: its {name} is on {parameter.device}{others}; wants all of it on one device; {_INSTEAD}"
            )


def check_not_sharded(network: EarlyExitNetwork) -> None:
    """Raise ``BadInput`` if each process has a shard of some parameter, where gradients of whole ones are averaged."""
    for name, parameter in network.named_parameters():
        if is_wrapped(parameter):
            wants = f"wants plain ones, whole in each process; {_INSTEAD}"
            raise BadInput(f"network: its {name} is {tensor_in_words(parameter)}, {wants}")


@contextmanager
def as_before(module: nn.Module) -> Iterator[None]:
    """At the end, put all parts of a module into the modes, and give parameters the gradients, that they had."""
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    try:
        with modes_kept(module):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


class AllExits(nn.Module):
    """The logits of all exits of a network as one forward, which DistributedDataParallel can wrap."""

    def __init__(self, network: EarlyExitNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Batch) -> list[Tensor]:
        """Return the logits of every head and, last, of the classifier."""
        return self.network.logits(x)


def new_classifier(network: EarlyExitNetwork) -> nn.Linear | None:
    """Return the linear layer that alone of a backbone requires gradients: the new classifier of a frozen one."""
    trained = (name for name, parameter in network.backbone.named_parameters() if parameter.requires_grad)
    names = {name.rpartition(".")[0] for name in trained}
    layer = network.backbone.get_submodule(names.pop()) if len(names) == 1 else None
    return layer if isinstance(layer, nn.Linear) else None


class HeadsOnFeatures(nn.Module):
    """A network's heads, and maybe its new classifier, on features that were computed before; they share parameters."""

    def __init__(self, heads: Sequence[AuxHead], classifier: nn.Linear | None = None) -> None:
        super().__init__()
        self._in_order = tuple(heads)
        self.heads = nn.ModuleList(heads)
        self.classifier = nn.Identity() if classifier is None else classifier

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        """Return the logits of every head and the classifier's.

        Args:
            features: of each tap what its head's ``features`` are, and last what the new classifier reads, or where
                there is none the classifier's logits [N, K], which are handed on.
        """
        *read, last = features
        logits = [head.logits_of_features(each) for head, each in zip(self._in_order, read, strict=True)]
        return [*logits, self.classifier(last)]


def accuracy_of_exits(network: EarlyExitNetwork, batches: Iterable[Any]) -> list[float]:
    """Return the accuracy of every head and, last, of the classifier, each on all images, from 0 to 1.

    Args:
        network: on one device; its mode stays as it is. It may be sharded over processes, all of which call this.
        batches: as of :func:`train`; others are refused.

    Raises:
        BadInput: a network that is split, over devices or with parts on meta.
    """
    check_on_one_device(network)
    device = next(network.parameters()).device
    return accuracies(AllExits(network), all_on_device("batches", batches, network, device)).tolist()


@torch.no_grad()
def accuracies(learner: nn.Module, batches: Iterable[tuple[Any, Tensor]]) -> Tensor:
    """Return the accuracy of each exit of a learner on batches that are on its device, float64 on that, too."""
    right: Tensor | None = None
    images = 0
    with as_before(learner):
        learner.eval()
        for x, labels in batches:
            logits = torch.stack(learner(x))  # [exits, N, K]
            numbers = ~logits.isnan().any(dim=2)  # argmax takes a NaN for the largest
            found = ((logits.argmax(dim=2) == labels) & numbers).sum(dim=1)
            right = found if right is None else right + found
            images += len(labels)
    if right is None or not images:
        raise ValueError("batches: got no image, wants at least one")
    return right.double() / images


class FeatureBatches(ShuffledBatches):
    """Batches (features, labels) of a data set, for :class:`HeadsOnFeatures`, on the device that trains."""

    def __init__(self, features: Sequence[Tensor], labels: Tensor, batch_size: int, seed: int | None) -> None:
        """Take features [M, D] of each tap, last logits or features [M, K] of the classifier, and labels [M]."""
        super().__init__(labels, min(batch_size, len(labels)), seed)
        self._features = features

    def __iter__(self) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Go through an epoch's batches."""
        for batch in self._order():
            yield [each[batch] for each in self._features], self._labels[batch]


@torch.no_grad()
def cache_features(
    network: EarlyExitNetwork,
    batches: Iterable[Any],
    autocast: torch.autocast,
    *,
    classifier: nn.Linear | None = None,
    seed: int | None,
    name: str = "batches",
    count: int | None = None,
) -> FeatureBatches:
    """Run the backbone once over some batches, in eval mode, and keep what each head reads of every image.

    Args:
        network: heads that know their width; its mode stays as it is.
        batches: (images, labels), as :func:`train` takes them; what changes at random is drawn this once.
        autocast: in which the backbone runs; features are kept in the heads' dtype.
        classifier: of the backbone; what it reads is kept in place of the logits.
        seed: of the order of the images in each epoch; None keeps that of ``batches``.
        name: of the argument that they are, for errors.
        count: how many there have to be; None for any number.

    Raises:
        ValueError: features of more than ``MOST_BYTES``, or no finite numbers; or as :func:`all_on_device`.
    """
    check_followed(network.taps, network.exit_heads)
    device = next(network.parameters()).device
    parts: list[list[Tensor]] = []
    finite: list[Tensor] = []  # of each batch whether images and features are
    kept = 0
    with as_before(network):
        network.eval()
        for x, wanted in all_on_device(name, batches, network, device, count):
            features: list[Tensor] = []  # of each tap what its head reads, pooled if it pools

            def keep(index: int, y: Tensor, to: list[Tensor] = features) -> None:
                to.append(network.exit_heads[index].features(y))

            with autocast, listening(network.backbone, network.taps, keep, network.reading_for(x)):
                last = (
                    call_with(network.backbone, x) if classifier is None else _read_by(classifier, network.backbone, x)
                )
            parts.append([*features, last, wanted])
            finite.append(torch.stack([all_finite(tensors_by_name(x).values()), all_finite(features)]))
            kept += sum(each.nbytes for each in parts[-1])
            if kept > MOST_BYTES:
                raise ValueError(
                    f"{name}: their features take more than {MOST_BYTES / 2**30:.0f} GiB of memory; to train heads "
                    "alone without keeping them, freeze the backbone (backbone.requires_grad_(False)) and take the "
                    "method 'joint'"
                )
    if not parts:
        raise ValueError(f"{name}: got none, wants at least one")
    for number, (of_images, of_features) in enumerate(torch.stack(finite).tolist(), 1):
        if not of_features:
            what = "what heads read of" if of_images else "images of"
            raise BadInput(f"{name}: {what} batch {number} are not all finite numbers, wants no NaN and no infinity")
    for tap, each in zip(network.taps, zip(*parts, strict=True), strict=False):
        if len({features.shape[1:] for features in each}) > 1:
            raise ValueError(f"{name}: what the head at {tap!r} reads has other sizes in other batches; wants 'joint'")
    *all_features, all_labels = (torch.cat(each) for each in zip(*parts, strict=True))
    return FeatureBatches(all_features, all_labels, len(parts[0][-1]), seed)


def _read_by(classifier: nn.Linear, backbone: nn.Module, x: Batch) -> Tensor:
    """Run a backbone and return what its classifier reads, in the classifier's dtype.

    Raises:
        ValueError: what that layer returns is not what the backbone does.
    """
    calls: list[tuple[Tensor, Tensor]] = []
    handle = classifier.register_forward_hook(lambda _layer, args, returned: calls.append((args[0], returned)))
    try:
        final = call_with(backbone, x)
    finally:
        handle.remove()
    if len(calls) != 1 or not torch.equal(final.nan_to_num(), calls[0][1].nan_to_num()):
        raise ValueError(
            "network: of the backbone one linear layer alone requires gradients, and is not what gives its logits; "
            "wants requires_grad_(False) for it, or the method 'joint'"
        )
    return calls[0][0].to(classifier.weight.dtype)
