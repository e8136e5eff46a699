"""``parallelize``: a network over several devices of one process: checks, cuts, balances and places it."""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from ..basics.arguments import check_batch, check_mode
from ..basics.bad_input import BadInput
from ..basics.memory import bytes_by_key, free_bytes
from ..listening.batches import of_size
from ..network.early_exit_network import EarlyExitNetwork, check_network
from ..runners.checks import check_heads, check_may_capture, sizes_of
from ..runners.overlapped import OverlappedRunner
from ..runners.polled import PolledRunner
from ..runners.runner import EagerRunner, Runner
from ..trunk.trunk import Trunk
from .balance import check_cuttable, described, measure, starts_of
from .cut import Cut, device_of
from .split_trunk import SplitTrunk

#: Ways to leave a network early that there are over several devices.
_RUNNERS = {"overlapped": OverlappedRunner, "polled": PolledRunner}


def parallelize(
    network: EarlyExitNetwork,
    example_input: Tensor,
    *,
    devices: Sequence[torch.device | str],
    balance: str | Sequence[str] = "auto",
    max_memory: Mapping[int, int | str] | None = None,
    exits: str = "overlapped",
    trunk: str = "as_is",
    batch_sizes: Sequence[int] | None = None,
) -> Runner:
    """Split a network over several devices that this process drives.

    Each device is given its part of the backbone, and nothing else; the heads, which are small, are on the first one,
    with requests and answers. What the network has is moved, and stays the same tensors. So a network that no device
    has room for is made on the CPU, or on ``meta`` and loaded by :func:`load_checkpoint`, which then reads each part
    when it is placed. On GPUs the network cannot be called then; ``network.to(device)`` brings it together again.

    A batch goes through the devices one after the other, so that all but one of them stand still: for throughput see
    :func:`pipelined`. Other than that the runner is one like those on one device, with CUDA graphs that hold what all
    devices do: the host waits for nothing, but to be told in "polled".

    Args:
        network: in eval mode, on one device of any kind; its backbone takes one tensor. Parts can end at taps through
            which all goes that later layers read.
        example_input: a batch [N, ...] of any size, on the network's device or the first one.
        devices: of the parts, in the order in which a batch goes through them; CUDA devices, of which some may be the
            same, or the CPU, several times.
        balance: "auto" lets the slowest part be as fast as can be, by times of the segments, which are measured one by
            one on the first device; or the taps behind which a batch goes on to the next device, one less than devices.
        max_memory: bytes that the network may take on a CUDA device, by its index, as an int or as in "10GiB", for
            "auto"; of others what is free.
        exits: "overlapped" (every head computed, beside the trunk) or "polled" (the host launches no more, on any
            device, once all samples of the batch are answered).
        trunk: how each device runs its part of the backbone, "as_is" or "cudnn", see :func:`make_trunk`. The second has
            folded copies of most weights, and while it is made of all in float64, if there is room.
        batch_sizes: to capture; None is that of the example.

    Raises:
        ValueError, TypeError: an argument that does not fit.
        BadInput: a device is not there; or no part can end where it is to, a part does not fit, two would share a
            parameter, a forward keeps a state, or the host reads a number in it.
        RuntimeError: the backbone cannot be captured in a CUDA graph; or autocast is on, or the current stream is being
            captured.

    Example:
        >>> images = torch.randn(4, 3, 64, 64)
        >>> network = attach(torchvision.models.resnet18(num_classes=10), ["layer2"], example_input=images).eval()
        >>> runner = parallelize(network, images, devices=["cpu", "cpu"])  # or "cuda:0", "cuda:1"
        >>> runner(images).label.shape
        torch.Size([4])
    """
    check_network(network)
    if not isinstance(exits, str) or exits not in _RUNNERS:
        raise ValueError(f"exits: got {exits!r}, wants one of {list(_RUNNERS)}")
    check_cuttable(trunk)
    check_batch("example_input", example_input)
    where = devices_of(devices)
    limits, sizes = _limits(where, max_memory), sizes_of(batch_sizes, example_input)
    check_mode(network)
    device, first = device_of(network), where[0]
    if example_input.device not in (device, first):
        raise ValueError(f"example_input: on {example_input.device}, wants {device}, the network's, or {first}")
    x = example_input.detach()
    network.check_taps(x.to(device))
    if first.type == "cuda":
        check_may_capture(network, x.to(first))
        check_heads(network)
    cut, x = Cut(network, x.to(device)), of_size(x, sizes[-1]).to(first)
    costs = cache(lambda: measure(cut, {len(x): x}, trunk))
    starts = starts_of("balance", balance, cut, limits, "devices", costs)
    said = described(cut, starts, where, costs() if balance == "auto" else None, len(x))
    try:
        split = _placed(cut, [*starts, cut.segments], where, x, trunk, said)
        cut.move_heads(network.exit_heads, first)
        runner: Runner = EagerRunner(network, trunk=split)
        if first.type == "cuda":
            runner = _RUNNERS[exits](network, x, batch_sizes=sizes, trunk=split)
    except BaseException:
        cut.move_back()
        raise
    network.unread = None  # all of it is read
    return runner


def _placed(
    cut: Cut, starts: Sequence[int], devices: Sequence[torch.device], x: Tensor, trunk: str, notes: Sequence[str]
) -> Trunk:
    """Move parts of the backbone to their devices, and make a trunk of them."""
    parts, shape = [], x.shape[1:]
    for (start, end), device in zip(pairwise(starts), devices, strict=True):
        with torch.no_grad(), torch.cuda.device(device.index if device.type == "cuda" else -1):
            x = x.to(device)
            parts.append(cut.place(start, end, cut.move(start, end, device), x, trunk))
            x = parts[-1].run(x, lambda *_: None)
    module = SplitTrunk(parts, devices, cut.network.taps, shape)
    of_parts = [note for placed in parts for note in placed.trunk.notes if placed.is_last or "classifier" not in note]
    said = dict.fromkeys(of_parts)
    trunks = [placed.trunk for placed in parts]
    return Trunk(module, None, trunks[0].memory_format, (*notes, *said), parts=trunks)


def _limits(devices: Sequence[torch.device], max_memory: Mapping[int, int | str] | None) -> list[int | None]:
    """Return the bytes that each part may take: of a device that has several, an equal share."""
    if max_memory is not None and devices[0].type == "cpu":
        raise ValueError(
            f"max_memory: got {max_memory!r}, wants None where the devices are CPUs, which take what there is"
        )
    among = f"the index of a CUDA device among {', '.join(map(str, devices))}"
    given = bytes_by_key("max_memory", max_memory, [device.index for device in devices], among)
    limits: list[int | None] = []
    for device in devices:
        room = free_bytes(device) if device.index not in given else given[device.index]
        limits.append(None if room is None else room // devices.count(device))
    return limits


def devices_of(devices: Sequence[torch.device | str]) -> list[torch.device]:
    """Return the devices, those of CUDA with an index; raises what :func:`parallelize` does."""
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Sequence) or not devices:
        raise ValueError(f"devices: got {devices!r}, wants a list of one device or more")
    found = []
    for given in devices:
        try:
            device = torch.device(given)
        except (RuntimeError, TypeError):
            raise ValueError(f"devices: got {given!r}, wants 'cuda:0' and the like, or 'cpu'") from None
        if device.type not in ("cuda", "cpu"):
            raise ValueError(f"devices: got {device}, wants CUDA devices or the CPU")
        if device.type == "cuda":
            there = torch.cuda.device_count()
            index = device.index
            if index is None:
                index = torch.cuda.current_device() if there else 0
            if index >= there:
                raise BadInput(f"devices: got cuda:{index}, but torch sees {there} CUDA devices here")
            device = torch.device("cuda", index)
        found.append(torch.device("cpu") if device.type == "cpu" else device)
    if len({device.type for device in found}) > 1:
        raise ValueError(f"devices: got {', '.join(map(str, found))}, wants all of one kind")
    return found
