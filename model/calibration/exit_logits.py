"""Logits of every exit of a network for the samples of a loader, collected in one pass."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..basics.arguments import check_batch, kind_of
from ..listening.batches import two_samples
from ..listening.flow import Flow
from ..listening.reading import parts_in_words
from ..network.early_exit_network import EarlyExitNetwork
from ..network.learned_from import identities, kind_of_input
from ..processes.dealing import dealt
from ..training.batches import pair_of


class ExitLogits(NamedTuple):
    """The logits of E heads and, last, of the classifier for M samples, on the CPU."""

    logits: Tensor
    """[E + 1, M, K] float32."""
    labels: Tensor
    """[M] int64."""
    identities: list[bytes]
    """Of each sample, by its content."""
    kinds: frozenset[str]
    """Of the samples; see :class:`Samples`."""
    static_labels: Tensor | None
    """[M] int64, what another network answers; None without one."""
    work: tuple[float, ...]
    """Done at each of the E + 1 exits, as a share of the backbone's FLOPs; 1 at the last."""


@torch.no_grad()
def collect_logits(
    network: EarlyExitNetwork,
    loader: Iterable[tuple[Tensor, Tensor]],
    static_model: nn.Module | None = None,
    name: str = "data",
) -> ExitLogits:
    """Run a network once over a loader, all exits, and its backbone on two samples more, to count its work.

    Processes that work together share the batches, and each gets what the exits say of all samples.

    Args:
        network: in eval mode.
        loader: yields batches of input [N, ...], which is brought to the network's device, and labels [N].
        static_model: another network, from the same input to logits [N, K].
        name: of the argument, for errors.

    Raises:
        TypeError, ValueError: no such network or loader, one without samples, labels that are no classes, or logits
            that are no finite numbers.
    """
    device = network.device
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(f"{name}: got {kind_of(loader)}, wants a DataLoader, or what else yields batches")

    def answered(numbered: tuple[int, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        number, (x, y) = numbered
        moved = x.to(device)
        exits = torch.stack(network.logits(moved)).float()
        parts = {}
        if number == 0:
            work = [*Flow(network.backbone, two_samples(moved)).work_at(network.taps), 1.0]
            parts["work"] = torch.tensor(work, dtype=torch.float64, device="cpu")
        answers = None if static_model is None else _labels(static_model(moved), exits[-1].shape)
        own = torch.frombuffer(bytearray(b"".join(identities(x))), dtype=torch.uint8)  # while the device is at work
        parts |= {"identities": own.reshape(len(x), -1), "logits": exits.cpu(), "labels": y.detach().cpu().long()}
        return parts if answers is None else {**parts, "static_labels": answers.cpu()}

    kinds: set[str] = set()
    batches = enumerate(_checked(batch, name, kinds) for batch in loader)
    each = list(dealt(batches, answered, _content, name))
    if not each:
        raise ValueError(f"{name}: got no batches, wants at least one; a generator that was read before has none")
    found = ExitLogits(
        torch.cat([one["logits"] for one in each], 1),
        torch.cat([one["labels"] for one in each]),
        [bytes(row) for one in each for row in one["identities"].numpy()],
        frozenset(kinds),
        torch.cat([one["static_labels"] for one in each]) if static_model is not None else None,
        tuple(each[0]["work"].tolist()),
    )
    classes = found.logits.shape[2]
    low, high = (int(label) for label in found.labels.aminmax())
    if low < 0 or high >= classes:
        raise ValueError(
            f"{name}: got labels from {low} to {high}, wants 0 to {classes - 1}, as the network has classes"
        )
    if not found.logits.isfinite().all():
        raise ValueError(f"{name}: the network's logits for it are not all finite, wants numbers")
    return found


def _content(numbered: tuple[int, tuple[Tensor, Tensor]]) -> bytes:
    """Return what tells whether processes go through the same batches, but for what costs a pass over all images."""
    _, (x, y) = numbered
    return repr((x.shape, x.dtype, y.tolist(), identities(x[:1]))).encode()


def _labels(static: object, like: torch.Size) -> Tensor:
    """Return the labels that the logits of another network say; ``ValueError`` if they are of other sizes."""
    if not isinstance(static, Tensor) or static.shape != like:
        raise ValueError(f"static_model: returned {parts_in_words(static)}, wants logits {list(like)}")
    return static.argmax(1)


def _checked(batch: object, name: str, kinds: set[str]) -> tuple[Tensor, Tensor]:
    x, y = pair_of(name, batch, "input [N, ...] and labels [N]")
    check_batch(f"{name}: input", x)
    if not isinstance(y, Tensor):
        raise TypeError(f"{name}: yields labels as {kind_of(y)}, wants a torch.Tensor [N]")
    if y.is_floating_point() or y.dtype == torch.bool or y.shape != x.shape[:1]:
        how = (
            ": labels.long()" if y.shape == x.shape[:1] else "" if y.ndim else ", as a DataLoader of the data set does"
        )
        wants = f"class indices [{len(x)}], whole numbers{how}"
        raise ValueError(f"{name}: yields labels {list(y.shape)} of {y.dtype}, wants {wants}")
    kinds.add(kind_of_input(x))
    return x, y


def joined(parts: Sequence[ExitLogits]) -> ExitLogits:
    """Return the samples of several loaders as those of one."""
    static = [part.static_labels for part in parts if part.static_labels is not None]
    return ExitLogits(
        torch.cat([part.logits for part in parts], 1),
        torch.cat([part.labels for part in parts]),
        [identity for part in parts for identity in part.identities],
        frozenset().union(*(part.kinds for part in parts)),
        torch.cat(static) if static else None,
        parts[0].work,
    )
