"""The logits of all exits as one program of ``torch.export``, for batches of any size."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ..bad_input import BadInput
from ..early_exit_network import EarlyExitNetwork
from .stages import Stage


class _Logits(nn.Module):
    """The logits of all exits as one forward, which is what exporters take."""

    def __init__(self, network: EarlyExitNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.network.logits(x))


def logits_program(network: EarlyExitNetwork, images: Tensor) -> ExportedProgram:
    """Return the program of a network's logits, whose operators write to nothing that others read.

    Args:
        network: in eval mode, its heads checked.
        images: two samples or more, lest the program be made for one.

    Raises:
        BadInput: torch.export cannot make it, or the backbone keeps a state, which files would not.
    """
    with one_line_of_exporter("network: torch.export cannot export it"):
        program = torch.export.export(_Logits(network), (images,), dynamic_shapes=({0: Dim.DYNAMIC},))
        program = program.run_decompositions({})  # into operators without side effects, and no further
    written = sorted(name.removeprefix("network.") for name in program.graph_signature.buffers_to_mutate.values())
    if written:
        raise BadInput(f"network: a forward writes to {written[0]!r}, wants none that does: files keep no state")
    return program


def stage_program(stage: Stage, handed: tuple[Tensor, ...]) -> ExportedProgram:
    """Return the program of a stage, given what the stages before hand to it for a batch of two samples or more."""
    batch = Dim("batch")
    shapes = tuple(
        {dim: _of_batch(size, batch) for dim, size in enumerate(each.shape) if isinstance(size, torch.SymInt)}
        for each in stage.takes
    )
    with one_line_of_exporter("network: torch.export cannot export a stage of it"):
        return torch.export.export(stage.module, handed, dynamic_shapes=shapes)


def _of_batch(size: Any, batch: Any) -> Any:
    """Return a multiple of the batch size as such: export would want two samples, told nothing of it."""
    times, rest = size.node.expr.as_coeff_Mul()
    return int(times) * batch if rest.is_Symbol and times.is_Integer else Dim.AUTO


@contextmanager
def quietly() -> Iterator[None]:
    """Keep to itself what PyTorch's exporters warn of: how they use PyTorch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        warnings.filterwarnings("ignore", "No complete tensor found in the group")  # said of channels_last weights
        yield


@contextmanager
def one_line_of_exporter(what: str) -> Iterator[None]:
    """Turn whatever PyTorch or ONNX raises into ``BadInput``, which says what it said."""
    with quietly(), torch.no_grad():
        try:
            yield
        except Exception as error:  # of many kinds
            if isinstance(error, OSError) and error.errno is not None:  # no space: nothing that an exporter cannot do
                raise
            raise BadInput(f"{what}: {type(error).__name__}: {' '.join(str(error).split()):.300}") from error
