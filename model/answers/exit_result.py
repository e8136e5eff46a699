"""``ExitResult``: the answer of an early-exit network, sample by sample."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree

from ...kernels import HeadOutput, merge
from ...kernels.exits import AnswerLayout


class ExitArrays(NamedTuple):
    """An :class:`ExitResult` as NumPy arrays."""

    label: np.ndarray
    confidence: np.ndarray
    probs: np.ndarray | None
    exit_index: np.ndarray


#: In the place of a part that nobody has asked for yet.
_UNSEEN: Any = object()


class ExitResult(Sequence[Any]):
    """The answer for N samples and K classes; the same from every runner.

    It unpacks like a tuple: ``label, confidence, probs, exit_index = result``. A runner's is one piece of memory, of
    which each part is viewed when it is asked for.
    """

    __slots__ = ("_packed", "_parts")

    _fields = ("label", "confidence", "probs", "exit_index")

    def __init__(
        self,
        label: Tensor | Iterable[Tensor | None],
        confidence: Tensor | None = None,
        probs: Tensor | None = None,
        exit_index: Tensor | None = None,
    ) -> None:
        """Hold the four parts, or those of one iterable, as ``torch.nn.DataParallel`` joins what its devices say."""
        self._parts: list[Any] = [label, confidence, probs, exit_index]
        if exit_index is None:
            self._parts = [*label] if confidence is probs is None else [label, confidence, probs]
        if len(self._parts) != 4:  # of what kind they are, trees of other things than tensors leave open
            raise TypeError(f"ExitResult: got {len(self._parts)} parts, wants {', '.join(self._fields)}")
        self._packed: tuple[Tensor, AnswerLayout, int] | None = None

    @classmethod
    def viewing(cls, packed: Tensor, layout: AnswerLayout, samples: int) -> "ExitResult":
        """Return the answer for the first samples that lies in ``packed``, which may be written later."""
        result = cls.__new__(cls)
        result._parts = [_UNSEEN] * 4
        result._packed = packed, layout, samples
        return result

    def _part(self, index: int, place: int) -> Any:
        part = self._parts[index]
        if part is _UNSEEN:
            assert self._packed is not None
            packed, layout, samples = self._packed
            part = self._parts[index] = layout.view(place, packed, samples)
        return part

    @property
    def label(self) -> Tensor:
        """[N] int64."""
        return cast(Tensor, self._part(0, 0))

    @property
    def confidence(self) -> Tensor:
        """[N] float32, by the criterion of the exit that answered; of the classifier the largest probability.

        Of a network in float64 confidence and probabilities are float64.
        """
        return cast(Tensor, self._part(1, 2))

    @property
    def probs(self) -> Tensor | None:
        """[N, K], in the dtype of the confidence; None where a head leaves them out."""
        return cast("Tensor | None", self._part(2, 3))

    @property
    def exit_index(self) -> Tensor:
        """[N] int64: the index of the tap whose head answered; the number of taps for the classifier."""
        return cast(Tensor, self._part(3, 1))

    def __len__(self) -> int:
        """Return 4, the number of parts."""
        return 4

    def __iter__(self) -> Iterator[Any]:
        """Go over label, confidence, probs and exit index."""
        return iter((self.label, self.confidence, self.probs, self.exit_index))

    def __getitem__(self, index: Any) -> Any:
        """Return a part by its index, or several by a slice."""
        return tuple(self)[index]

    def _asdict(self) -> dict[str, Any]:
        """Return the parts by name, as a named tuple does."""
        return dict(zip(self._fields, self, strict=True))

    def _replace(self, **parts: Tensor | None) -> "ExitResult":
        """Return an answer with other parts in some places, as a named tuple does."""
        return ExitResult(**{**self._asdict(), **parts})

    def cpu(self) -> "ExitResult":
        """Return the answer on the CPU, when it is there: of a runner's in one copy, of one on the CPU itself."""
        if self._packed is not None:
            packed, layout, samples = self._packed
            return self if packed.is_cpu else ExitResult.viewing(packed.cpu(), layout, samples)
        return ExitResult(None if part is None else part.cpu() for part in self)

    def numpy(self) -> ExitArrays:
        """Return the answer as arrays, from a GPU by one copy, from the CPU by none: they share its memory.

        Other frameworks take each part as it is by DLPack: ``jax.dlpack.from_dlpack(result.label)``.
        """
        there = self.cpu()
        probs = None if there.probs is None else there.probs.numpy()
        return ExitArrays(there.label.numpy(), there.confidence.numpy(), probs, there.exit_index.numpy())

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle the parts."""
        return ExitResult, tuple(self)

    def __repr__(self) -> str:
        """Show all parts."""
        return f"ExitResult({', '.join(f'{name}={part!r}' for name, part in self._asdict().items())})"


# torch.export.save and AOTInductor want a name
_pytree.register_pytree_node(
    ExitResult,
    lambda result: (list(result), None),
    lambda parts, _context: ExitResult(parts),
    serialized_type_name="auxhead.model.ExitResult",
    to_dumpable_context=lambda _context: "",
    from_dumpable_context=lambda _dumped: None,
)


def first_sure(outputs: Sequence[HeadOutput], *, with_probs: bool) -> ExitResult:
    """Answer by the first exit that is sure of a sample, else the last one; see ``kernels/reference/merge.py``."""
    return ExitResult(*merge(outputs, with_probs=with_probs))


def joined(results: Sequence[ExitResult]) -> ExitResult:
    """Join the answers of the parts of a batch."""
    probs = [result.probs for result in results if result.probs is not None]
    return ExitResult(
        label=torch.cat([result.label for result in results]),
        confidence=torch.cat([result.confidence for result in results]),
        probs=torch.cat(probs) if probs else None,
        exit_index=torch.cat([result.exit_index for result in results]),
    )
