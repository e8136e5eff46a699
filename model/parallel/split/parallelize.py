"""``parallelize``: a network over several devices in one process: checks, cuts, places by measured times, captures."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from ....kernels.cuda.runtime import beside_captures
from ...answers.exit_monitor import uncounted
from ...answers.rule_order import wait_for_writes
from ...basics.arguments import check_batch
from ...basics.bad_input import BadInput
from ...listening.batches import of_size
from ...make_runner import eager_runner
from ...network.early_exit_network import EarlyExitNetwork, check_network
from ...runners.capture import CAPTURE_LOCK
from ...runners.checks import check_capturable, check_device, sizes_of
from ...runners.runner import EagerRunner
from ...trunk.trunk import make_trunk
from ..segments import balanced, check_cuttable, segments_of, starts_of
from .captured import capture_split, graph_times
from .part import OnDevice, Part, free, reach_each_other, take_captures, wait_for_current_streams
from .runner import SplitRunner

#: Ways to leave a network early that there are over several devices.
EXITS = ("overlapped", "polled")


def parallelize(
    network: EarlyExitNetwork,
    example_input: Tensor,
    *,
    devices: Sequence[torch.device | str],
    balance: str | Sequence[str] = "auto",
    exits: str = "overlapped",
    trunk: str = "as_is",
    batch_sizes: Sequence[int] | None = None,
) -> SplitRunner | EagerRunner:
    """Split a network over several devices that this process drives.

    A batch goes through the devices one after the other, so that all but one of them stand still: for throughput see
    :func:`pipelined`. The backbone is cut at its taps, by ``torch.export``. Each device has its part of the backbone
    and the heads of that, streams and CUDA graphs; activations and answers cross on streams for copies, and events
    order all that: the host waits for nothing, but to be told in "polled". Requests come and answers go on the first
    device.

    On CPUs the network runs as a whole, eagerly: the same answers, and nothing faster.

    Args:
        network: in eval mode, on the first device; its backbone takes one tensor. Parts on other devices are copies;
            each such device has room for all parameters of the network, the first one twice while they are made.
        example_input: a batch [N, ...] of any size, there, too.
        devices: of the parts, in the order in which a batch goes through them; CUDA devices, of which some may be the
            same, or the CPU, several times.
        balance: "auto" lets the slowest part be as fast as can be, by times of the segments measured on the first
            device; or the taps behind which a batch goes on to the next device, one less than devices.
        exits: "overlapped" (every head computed, beside the trunk) or "polled" (the host launches no more, on any
            device, once all samples of the batch are answered).
        trunk: how each device runs its part of the backbone, "as_is" or "cudnn", see :func:`make_trunk`.
        batch_sizes: to capture; None is that of the example.

    Raises:
        ValueError, TypeError: an argument that does not fit.
        BadInput: a device is not there; or torch.export cannot trace the backbone.
        RuntimeError: the backbone cannot be captured in a CUDA graph; or autocast is on, or the current stream is being
            captured.
    """
    check_network(network)
    if exits not in EXITS:
        raise ValueError(f"exits: got {exits!r}, wants one of {list(EXITS)}")
    check_cuttable(trunk)
    check_batch("example_input", example_input)
    where = devices_of(devices)
    starts = starts_of("balance", balance, network.taps, len(where), "devices")
    sizes = sizes_of(batch_sizes, example_input)
    if example_input.device != where[0]:
        raise ValueError(f"example_input: on {example_input.device}, wants {where[0]}, the first of the devices")
    x = example_input.detach()
    if where[0].type == "cuda":
        check_capturable(network, x)
        return _captured(network, x, where, starts, sizes, exits, trunk)
    check_device(network, x.device)
    note = "On CPUs there are no parts: the network runs as a whole, eagerly."
    return eager_runner(network, x, None, trunk, note)


def _captured(
    network: EarlyExitNetwork,
    x: Tensor,
    devices: Sequence[torch.device],
    starts: list[int] | None,
    sizes: Sequence[int],
    exits: str,
    trunk: str,
) -> SplitRunner:
    first, parts = devices[0], list[Part]()
    with (
        CAPTURE_LOCK,
        beside_captures(),
        torch.cuda.device(first),
        torch.inference_mode(False),  # inference tensors could not be written to outside of it
        torch.no_grad(),
    ):
        try:
            wait_for_writes([head.rule for head in network.exit_heads], torch.cuda.current_stream(first))
            networks = {first: network}
            for device in devices:
                if device not in networks:
                    networks[device] = copy.deepcopy(network).to(device)
            reach_each_other(devices)
            there = {device: _on_device(of_device, x, sizes, device, trunk) for device, of_device in networks.items()}
            x = x.contiguous(memory_format=there[first].trunk.memory_format)
            us = _times(there[first], x, sizes)
            starts = starts or balanced(us[sizes[-1]], len(devices))
            ends = [*starts[1:], len(network.taps) + 1]
            for number, (device, start, end) in enumerate(zip(devices, starts, ends, strict=True)):
                parts.append(Part(number, device, there[device], start, end))
            polls = exits == "polled"
            with uncounted(network.monitor):
                captured = {
                    size: capture_split(network, parts, of_size(x, size), us[size], polls=polls)
                    for size in reversed(sizes)
                }
            wait_for_current_streams(devices)
            notes = [
                *_described(parts, network.taps, us[sizes[-1]], sizes[-1]),
                *(f"Batch {size}: {captured[size].batch.description}" for size in sizes),
                *there[first].trunk.notes,
            ]
            return SplitRunner(network, parts, x, captured, "\n".join(notes), polls=polls)
        except BaseException:
            free(parts)
            raise


def _on_device(
    network: EarlyExitNetwork, x: Tensor, sizes: Sequence[int], device: torch.device, trunk: str
) -> OnDevice:
    batches = {size: of_size(x, size).to(device) for size in sizes}
    made = make_trunk(network.backbone, network.taps, batches[sizes[-1]], trunk, network.reading)
    segments = {
        size: segments_of(network, made, batch.contiguous(memory_format=made.memory_format), device)
        for size, batch in batches.items()
    }
    return OnDevice(network, made, segments)


def _times(there: OnDevice, x: Tensor, sizes: Sequence[int]) -> dict[int, list[float]]:
    """Measure the segments for each size, in microseconds, on the device of the batch."""
    captures = take_captures(x.device)
    try:
        found = {}
        for size in sizes:
            with there.trunk.choosing(size):
                found[size] = graph_times(there.network, there.segments[size], of_size(x, size), captures)
        return found
    finally:
        captures.free_or_leave()


def _described(parts: Sequence[Part], taps: Sequence[str], us: Sequence[float], size: int) -> list[str]:
    lines = []
    for part in parts:
        begins = f"behind {taps[part.start - 1]}" if part.start else "from the input"
        ms = sum(us[part.start : part.end]) / 1000
        lines.append(f"Part {part.number} on {part.device}, {begins}: {ms:.3g} ms a batch of {size}.")
    return lines


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
