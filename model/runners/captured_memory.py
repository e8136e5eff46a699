"""Memory of a network's parameters and buffers that graphs read: kept, and detects those that lie elsewhere now."""

from collections.abc import Container

from ..early_exit_network import EarlyExitNetwork


class CapturedMemory:
    """Parameters and buffers of a network where they lay at the capture."""

    def __init__(self, network: EarlyExitNetwork, read: Container[int] | None = None) -> None:
        """Remember those at the addresses that graphs read, or that copies are made from; None: all."""
        self._tensors = [
            (name, tensor, tensor.detach(), tensor.data_ptr())  # detached, it keeps the memory whatever is assigned
            for name, tensor in (*network.named_parameters(), *network.named_buffers())
            if read is None or tensor.data_ptr() in read
        ]

    def check_unmoved(self, network: EarlyExitNetwork) -> None:
        """Raise a ``RuntimeError`` that names a parameter or buffer that is another one now, or in other memory."""
        now = dict((*network.named_parameters(), *network.named_buffers()))
        for name, tensor, _kept, address in self._tensors:
            if now.get(name) is not tensor or tensor.data_ptr() != address:
                raise RuntimeError(
                    f"network: {name} was given other memory since the capture; copy into it, or make a new runner"
                )

    def clear(self) -> None:
        """Let the memory go."""
        self._tensors.clear()
