"""Samples of a calibration: what every exit says of them, who they are, and which split each is in."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..basics.arguments import kind_of
from ..listening.batches import Batch, call_with, check_input_batch, first_tensor, on_device, two_samples
from ..listening.dry_run import Flow
from ..listening.reading import parts_in_words, the_mask
from ..network.early_exit_network import EarlyExitNetwork
from ..network.learned_from import NEW, ROLES, identities, kind_of_input
from ..processes.dealing import dealt
from ..training.batches import pair_of

#: Names of the splits, and the share of the samples that each gets where they are drawn. The one for thresholds is the
#: largest: a bound of 1 % at 90 % takes 230 samples of which none is lost.
SHARES = {"temperature": 0.2, "thresholds": 0.5, "test": 0.3}


def sample_identities(loader: Iterable[Any], network: EarlyExitNetwork | None = None) -> set[bytes]:
    """Return the identities of all samples of a loader, by which :func:`calibrate_network` knows the training samples.

    A sample is known by its bytes: the loader yields batches of input [N, ...] and labels, without random changes, and
    prepared as those for calibration are. Of several inputs padding is left out by the mask that the heads of
    ``network`` read by, or of a dict, without one, by its one mask that is called so. Others raise ``TypeError`` or
    ``ValueError``.
    """
    found: set[bytes] = set()
    for batch in loader:
        x, _ = pair_of("loader", batch, "input [N, ...] and labels [N]")
        check_input_batch("loader: input", x)
        named = x if isinstance(x, Mapping) else {}
        found.update(identities(x, the_mask({}, named) if network is None else network.mask_in(x)))
    return found


def draw_splits(samples: Sequence[bytes], seed: int, roles: Sequence[int] | None = None) -> dict[str, Tensor]:
    """Draw the splits at random; samples of the same content go into the same one.

    What temperatures or thresholds were chosen with before stays in its split, so that nothing is tested on it, however
    often a network is calibrated; new samples fill the splits up.

    ``samples`` has the identity of each, ``roles`` its role, see :data:`ROLES`: what weights were made from is in no
    split; None: all are new. Indices of a split are in random order, so that neighbours have nothing in common.
    """
    role_of: dict[bytes, int] = {}
    members: dict[bytes, list[int]] = {}
    for index, identity in enumerate(samples):
        members.setdefault(identity, []).append(index)
        role_of[identity] = min(role_of.get(identity, NEW), NEW if roles is None else roles[index])
    kept = {name: [one for one, role in role_of.items() if 0 < role < NEW and ROLES[role] == name] for name in SHARES}
    fresh = [one for one, role in role_of.items() if role == NEW]
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(fresh), generator=generator, device="cpu").tolist()
    usable = max(1, len(order) + sum(map(len, kept.values())))
    wanted = {name: max(0.0, share - len(kept[name]) / usable) for name, share in SHARES.items()}
    empty = [name for name in SHARES if not kept[name]]
    if len(order) < len(empty):
        but = "" if roles is None else " that it has not learned from"
        raise ValueError(
            f"data: got {len(order)} different samples{but}, wants at least one for each of {', '.join(empty)}, of "
            "data that train did not get"
        )
    drawn, begin, share = {}, 0, 0.0
    for name, more in wanted.items():
        share += more
        empty = [other for other in empty if other != name]
        most = len(order) - len(empty)  # one is left for each that follows
        end = min(max(round(share / sum(wanted.values()) * len(order)), begin + (not kept[name])), most)
        own = [*(fresh[place] for place in order[begin:end]), *kept[name]]
        found = torch.tensor([index for one in own for index in members[one]], device="cpu")
        drawn[name] = found[torch.randperm(len(found), generator=generator, device="cpu")] if kept[name] else found
        begin = end
    return drawn


def check_names(name: str, splits: Mapping[str, object]) -> None:
    """Raise ``ValueError`` unless a mapping has the three splits."""
    if set(splits) != set(SHARES):
        raise ValueError(f"{name}: got splits {sorted(map(str, splits))}, wants {sorted(SHARES)}")


def check_indices(name: str, indices: object, count: int) -> Tensor:
    """Return indices of samples, [M] int64 on the CPU; ``TypeError`` or ``ValueError`` if they are none."""
    try:
        found = torch.as_tensor(indices, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}: got {kind_of(indices)}, wants indices of samples, whole numbers") from None
    if found.numel() and (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool):
        raise TypeError(f"{name}: got {found.dtype}, wants indices of samples, whole numbers")
    found = found.detach().cpu().long()
    if found.ndim != 1 or not len(found):
        raise ValueError(f"{name}: got shape {list(found.shape)}, wants [M] with at least one index")
    if int(found.min()) < 0 or int(found.max()) >= count:
        raise ValueError(f"{name}: got indices from {int(found.min())} to {int(found.max())}, wants 0 to {count - 1}")
    values, counts = found.unique(return_counts=True)
    if len(values) < len(found):
        raise ValueError(f"{name}: got sample {values[counts > 1][0]} more than once, wants each once")
    return found


def as_identities(train: object, samples: Sequence[bytes], *, by_index: bool) -> Set[bytes]:
    """Return the identities of the samples that a network has learned from, given them or indices.

    Not ``by_index`` where samples come from several loaders, so that an index says nothing.
    """
    if isinstance(train, Set):
        strange = next((one for one in train if not isinstance(one, bytes)), None)
        if strange is not None:
            raise TypeError(f"train: got a set with {kind_of(strange)}, wants one of sample_identities, or indices")
        return train
    if not by_index:
        raise TypeError(
            f"train: got {kind_of(train)}, wants a set of sample_identities where data is a dict of loaders"
        )
    try:
        return {samples[index] for index in check_indices("train", train, len(samples)).tolist()}
    except TypeError as error:
        raise TypeError(f"{error}; or sample_identities(loader), a set, which is empty if there were none") from None


def refuse_shared(samples: Sequence[bytes], splits: Mapping[str, Tensor]) -> None:
    """Raise ``ValueError`` for splits of which a sample, by its index or by its content, is in two."""
    owner: dict[bytes, tuple[str, int]] = {}
    shared: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for name, indices in splits.items():
        for index in indices.tolist():
            first, at = owner.setdefault(samples[index], (name, index))
            if first != name:
                shared.setdefault((first, name), []).append((at, index))
    for (first, second), pairs in shared.items():
        at, index = pairs[0]
        same = f"sample {index}" if at == index else f"samples {at} and {index}, which are equal"
        raise ValueError(f"splits: {first} and {second} share {len(pairs)} samples, such as {same}; wants none in two")


def refuse_seen(samples: Sequence[bytes], splits: Mapping[str, Tensor], roles: Tensor) -> None:
    """Raise ``ValueError`` for splits with a sample that weights or an earlier split were made with."""
    for role, name in enumerate(("train", *(f"{name} of before" for name in ROLES[1:]))):
        later = {split: splits[split] for split in tuple(SHARES)[role:]}
        refuse_shared(samples, {name: (roles == role).nonzero()[:, 0], **later})


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
    flops: float
    """Of the backbone for one sample, see :attr:`Flow.flops`."""


@torch.no_grad()
def collect_logits(
    network: EarlyExitNetwork,
    loader: Iterable[Any],
    static_model: nn.Module | None = None,
    name: str = "data",
) -> ExitLogits:
    """Run a network once over a loader, all exits, and its backbone on two samples more, to count its work.

    Processes that work together share the batches, and each gets what the exits say of all samples.

    Args:
        network: in eval mode.
        loader: yields batches, which are brought to the network's device; see :func:`calibrate_network`.
        static_model: another network, from the same input to logits [N, K].
        name: of the argument, for errors.
    """
    device = network.device
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(f"{name}: got {kind_of(loader)}, wants a DataLoader, or what else yields batches")

    def answered(numbered: tuple[int, tuple[Batch, Tensor]]) -> dict[str, Tensor]:
        number, (x, y) = numbered
        moved = on_device(x, device)
        exits = torch.stack(network.logits(moved)).float()
        parts = {}
        if number == 0:
            flow = Flow(network.backbone, two_samples(moved))
            work = [*flow.work_at(network.taps), 1.0, flow.flops]
            parts["work"] = torch.tensor(work, dtype=torch.float64, device="cpu")
        if static_model is not None:
            static = call_with(static_model, moved)
            if not isinstance(static, Tensor) or static.shape != exits[-1].shape:
                wants = f"logits {list(exits[-1].shape)}"
                raise ValueError(f"static_model: returned {parts_in_words(static)}, wants {wants}")
            parts["static_labels"] = static.argmax(1).cpu()
        hashes = b"".join(identities(x, network.mask_in(x)))
        own = torch.frombuffer(bytearray(hashes), dtype=torch.uint8)  # while the device is at work
        parts |= {"identities": own.reshape(len(y), -1), "logits": exits.cpu(), "labels": y.detach().cpu().long()}
        return parts

    kinds: set[str] = set()
    batches = enumerate(_checked(batch, name, network, kinds) for batch in loader)
    each = list(dealt(batches, answered, _content, name))
    if not each:
        raise ValueError(f"{name}: got no batches, wants at least one; a generator that was read before has none")
    *work, flops = each[0]["work"].tolist()
    found = ExitLogits(
        torch.cat([one["logits"] for one in each], 1),
        torch.cat([one["labels"] for one in each]),
        [bytes(row) for one in each for row in one["identities"].numpy()],
        frozenset(kinds),
        torch.cat([one["static_labels"] for one in each]) if static_model is not None else None,
        tuple(work),
        flops,
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


def _content(numbered: tuple[int, tuple[Batch, Tensor]]) -> bytes:
    """Return what tells whether processes go through the same batches, but for what costs a pass over all images."""
    _, (x, y) = numbered
    return repr((kind_of_input(x), y.tolist(), identities(two_samples(x))[:1])).encode()


def _checked(batch: object, name: str, network: EarlyExitNetwork, kinds: set[str]) -> tuple[Batch, Tensor]:
    x, y = pair_of(name, batch, "input [N, ...] and labels [N]")
    check_input_batch(f"{name}: input", x)
    samples = first_tensor(x).shape[:1]
    if not isinstance(y, Tensor):
        raise TypeError(f"{name}: yields labels as {kind_of(y)}, wants a torch.Tensor [N]")
    if y.is_floating_point() or y.dtype == torch.bool or y.shape != samples:
        how = ": labels.long()" if y.shape == samples else "" if y.ndim else ", as a DataLoader of the data set does"
        wants = f"class indices {list(samples)}, whole numbers{how}"
        raise ValueError(f"{name}: yields labels {list(y.shape)} of {y.dtype}, wants {wants}")
    kinds.add(kind_of_input(x, network.mask_in(x)))
    return x, y


def one_of_all(parts: Sequence[ExitLogits]) -> ExitLogits:
    """Return the samples of several loaders as those of one."""
    static = [part.static_labels for part in parts if part.static_labels is not None]
    return ExitLogits(
        torch.cat([part.logits for part in parts], 1),
        torch.cat([part.labels for part in parts]),
        [identity for part in parts for identity in part.identities],
        frozenset().union(*(part.kinds for part in parts)),
        torch.cat(static) if static else None,
        parts[0].work,
        parts[0].flops,
    )
