"""Splits of samples for calibration: temperatures, thresholds, test; no sample is in two of them."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence, Set

import torch
from torch import Tensor

from ..arguments import kind_of

#: Names of the splits, and the share of the samples that each gets where they are drawn. The one for thresholds is the
#: largest: a bound of 1 % at 90 % takes 230 samples of which none is lost.
SHARES = {"temperature": 0.2, "thresholds": 0.5, "test": 0.3}


def identities(x: Tensor) -> list[bytes]:
    """Return of each sample of a batch [N, ...] a hash of its content, 16 bytes."""
    rows = x.detach().cpu().contiguous().reshape(len(x), -1).view(torch.uint8).numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows]


def sample_identities(loader: Iterable[tuple[Tensor, Tensor]]) -> set[bytes]:
    """Return the identities of all samples of a loader, by which :func:`calibrate_network` knows the training samples.

    Args:
        loader: yields batches of input [N, ...] and labels; without random changes of images, and prepared as those
            for calibration are: a sample is known by its bytes.
    """
    return {identity for x, _ in loader for identity in identities(x)}


def draw_splits(samples: Sequence[bytes], seed: int, left_out: Set[int] = frozenset()) -> dict[str, Tensor]:
    """Draw the splits at random; samples of the same content go into the same one.

    Args:
        samples: of each sample the identity.
        seed: of the draw.
        left_out: indices that are in no split.

    Returns:
        The indices of each split, in random order, so that neighbours have nothing in common.

    Raises:
        ValueError: too few samples.
    """
    groups: dict[bytes, list[int]] = {}
    for index, identity in enumerate(samples):
        if index not in left_out:
            groups.setdefault(identity, []).append(index)
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).tolist()
    if len(order) < len(SHARES):
        raise ValueError(f"data: got {len(order)} different samples, wants at least one for each of {list(SHARES)}")
    drawn, members, begin, share = {}, list(groups.values()), 0, 0.0
    for number, (name, own) in enumerate(SHARES.items()):
        share += own
        most = len(order) - (len(SHARES) - 1 - number)  # one is left for each that follows
        end = min(max(round(share * len(order)), begin + 1), most)
        drawn[name] = torch.tensor([index for group in order[begin:end] for index in members[group]])
        begin = end
    return drawn


def check_names(name: str, splits: Mapping[str, object]) -> None:
    """Raise ``ValueError`` unless a mapping has the three splits."""
    if set(splits) != set(SHARES):
        raise ValueError(f"{name}: got splits {sorted(map(str, splits))}, wants {sorted(SHARES)}")


def check_indices(name: str, indices: object, count: int) -> Tensor:
    """Return indices of samples, [M] int64 on the CPU.

    Raises:
        TypeError: no tensor or sequence of whole numbers.
        ValueError: none, of another shape, or outside of the samples.
    """
    try:
        found = torch.as_tensor(indices)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}: got {kind_of(indices)}, wants indices of samples, whole numbers") from None
    if found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise TypeError(f"{name}: got {found.dtype}, wants indices of samples, whole numbers")
    found = found.detach().cpu().long()
    if found.ndim != 1 or not len(found):
        raise ValueError(f"{name}: got shape {list(found.shape)}, wants [M] with at least one index")
    if int(found.min()) < 0 or int(found.max()) >= count:
        raise ValueError(f"{name}: got indices from {int(found.min())} to {int(found.max())}, wants 0 to {count - 1}")
    return found


def learned_from(train: object, samples: Sequence[bytes], *, by_index: bool) -> Tensor:
    """Return the indices of the samples that a network has learned from, and of those that equal them, in order.

    Args:
        train: identities, indices or None; see :func:`calibrate_network`.
        samples: of each sample the identity.
        by_index: False where the samples come from several loaders, and an index says nothing.

    Raises:
        TypeError, ValueError: ``train`` is none of these.
    """
    if train is None:
        return torch.empty(0, dtype=torch.int64)
    if isinstance(train, Set):
        strange = next((one for one in train if not isinstance(one, bytes)), None)
        if strange is not None:
            raise TypeError(f"train: got a set with {kind_of(strange)}, wants one of sample_identities, or indices")
        known = train
    elif not by_index:
        raise TypeError(
            f"train: got {kind_of(train)}, wants a set of sample_identities where data is a dict of loaders"
        )
    else:
        known = {samples[index] for index in check_indices("train", train, len(samples)).tolist()}
    return torch.tensor([index for index, one in enumerate(samples) if one in known], dtype=torch.int64)


def refuse_shared(samples: Sequence[bytes], splits: Mapping[str, Tensor]) -> None:
    """Refuse splits of which a sample, by its index or by its content, is in two.

    Raises:
        ValueError: names the splits, the number of samples and one of them.
    """
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
