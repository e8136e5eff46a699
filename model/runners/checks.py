"""Checks of what a graph runner is made from and called with; each error names the argument."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..basics.arguments import check_batch, check_dense, check_mode
from ..listening.hooks import has_hooks
from ..network.early_exit_network import EarlyExitNetwork


def check_capturable(network: EarlyExitNetwork, example_input: Tensor, *, in_parts: bool = False) -> None:
    """Check network, example and taps; raises as :class:`GraphRunner` does for what cannot be captured.

    Parts of the backbone may be on other devices, if it is ``in_parts``; its taps are checked then.
    """
    check_may_capture(network, example_input)
    if not in_parts:
        check_device(network.backbone, example_input.device)
        network.check_taps(example_input)
    check_device(network.heads if in_parts else network, example_input.device)
    check_heads(network)


def check_may_capture(network: EarlyExitNetwork, example_input: Tensor) -> None:
    """Check all but on which device the network is, and its taps."""
    check_batch("example_input", example_input)
    _check_cuda(example_input)
    _check_allocator()
    check_mode(network)
    if torch.is_autocast_enabled("cuda"):
        raise RuntimeError("a runner cannot capture under autocast; leave it and cast the network, or use 'eager'")
    with torch.cuda.device_of(example_input):
        check_no_outer_capture()


def check_heads(network: EarlyExitNetwork) -> None:
    """Raise ``ValueError`` for a head that no graph would follow; taps are checked, so that heads have their sizes."""
    for tap, head in zip(network.taps, network.exit_heads, strict=True):
        why = head.why_not_launched() or ("carries hooks" if has_hooks(head) else None)
        if why is not None:
            raise ValueError(
                f"heads[{tap!r}]: {why}, which a graph would not follow; wants plain layers (adapters merged, "
                "parametrizations and hooks removed), or the runner 'eager'"
            )
        try:
            head.as_exit_head()
        except ValueError as error:
            raise ValueError(f"heads[{tap!r}]: {error}") from None


def sizes_of(batch_sizes: Sequence[int] | str | None, example_input: Tensor) -> list[int]:
    """Return the batch sizes to capture as :func:`check_sizes` does; None is that of the example."""
    if batch_sizes is None:
        check_batch("example_input", example_input)
        return [len(example_input)]
    return check_sizes(batch_sizes)


def check_sizes(batch_sizes: Sequence[int] | str) -> list[int]:
    """Return the batch sizes to capture, in ascending order; raises ``ValueError`` or ``TypeError``."""
    if isinstance(batch_sizes, str):
        raise ValueError(f"batch_sizes: got {batch_sizes!r}, wants positive ints; 'on_demand' goes with exits='auto'")
    try:
        sizes = list(batch_sizes)
    except TypeError:
        raise TypeError(f"batch_sizes: got {batch_sizes!r}, wants a sequence of positive ints") from None
    if not sizes or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise ValueError(f"batch_sizes: got {sizes}, wants positive ints")
    return sorted(set(sizes))


def check_request(x: Tensor, sample_shape: torch.Size, dtype: torch.dtype, device: torch.device) -> int:
    """Return the number of samples of a request, or raise; asked at each, so that the cheapest test comes first."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x: got {type(x).__name__}, wants a torch.Tensor")
    check_dense("x", x)
    shape = x.shape
    if not shape or shape[1:] != sample_shape or not shape[0]:
        raise ValueError(f"x: got shape {list(shape)}, wants [N, {', '.join(map(str, sample_shape))}] and N >= 1")
    if x.dtype != dtype:
        raise TypeError(f"x: got {x.dtype}, wants {dtype}, the dtype of the example input")
    if x.device != device and not x.is_cpu:
        raise ValueError(f"x: got device {x.device}, wants {device} or the CPU")
    return shape[0]


def check_no_outer_capture() -> None:
    """Raise ``RuntimeError`` while the current stream is being captured."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the current stream is being captured, and a runner replays graphs of its own: call it outside of the "
            "capture, or capture a call of the network"
        )


def is_on_cuda(x: object) -> bool:
    """Return whether there can be graphs for a batch like this."""
    return isinstance(x, Tensor) and x.device.type == "cuda"


def _check_cuda(example_input: Tensor) -> None:
    if not is_on_cuda(example_input):
        raise ValueError(f"example_input: on {example_input.device}, wants a CUDA device; exits='eager' runs on any")


def _check_allocator() -> None:
    if torch.cuda.get_allocator_backend() != "native":
        raise RuntimeError(
            f"PyTorch's allocator of CUDA memory is {torch.cuda.get_allocator_backend()}, which keeps no memory apart "
            "for graphs; wants 'native': take backend:cudaMallocAsync out of PYTORCH_CUDA_ALLOC_CONF, or use 'eager'"
        )


def check_device(network: nn.Module, device: torch.device) -> None:
    """Raise ``ValueError`` if a parameter is on another device than the example."""
    for name, parameter in network.named_parameters():
        if parameter.device != device:
            raise ValueError(f"network: {name} is on {parameter.device}, wants {device} as the example input")
