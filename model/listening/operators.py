"""Operators as they run: which tensors they write to, what they cost, and which dimensions they take for channels."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..basics.arguments import is_plain

#: Dimension of the channels in the first argument, and in the first output, of an operator with this name.
_CHANNELS_SECOND = {
    *("convolution", "cudnn_convolution", "mkldnn_convolution", "native_group_norm"),
    *("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit"),
    *("_native_batch_norm_legit_no_training", "_batch_norm_no_update", "_batch_norm_with_update"),
    *("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "adaptive_max_pool2d"),
    # which inference mode does not take apart
    *("conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d", "batch_norm", "group_norm", "instance_norm"),
    *("max_pool1d", "max_pool2d", "avg_pool1d", "adaptive_avg_pool1d", "adaptive_avg_pool2d"),
}
_CHANNELS_LAST = {
    *("native_layer_norm", "_fused_rms_norm", "mm", "_transformer_encoder_layer_fwd"),
    *("layer_norm", "rms_norm", "linear"),
}
#: Operators that copy: to another dtype under autocast, in other strides, or what a lazy view stands for.
_COPIES = ("clone", "_to_copy")


#: Attention in one operator, one of which each device takes. PyTorch's own counter passes over that of the CPU, and
#: fails where several heads of queries share one of keys.
_ATTENTION = frozenset(
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}")
    for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
)


class OperatorMode(TorchDispatchMode):
    """The base of dispatch modes here: layers that are compiled run compiled, unless they are told to run eagerly."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled layers run as they would without the mode."""
        return True


def written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the arguments that an operator writes to, but for those without memory of their own to compare."""
    if not (isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable):
        return []
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    written = [arg.name for arg in func._schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]
    return [tensor for name in written for tensor in tree_leaves(given.get(name)) if is_plain(tensor)]


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> int:
    """Return the work of an operator: that of convolutions, products and attention."""
    if not isinstance(func, torch._ops.OpOverload):
        return 0
    if func.overloadpacket in _ATTENTION:
        query, key, value = args[:3]  # [N, heads, tokens, width]
        samples, heads, tokens, width = query.shape
        return 2 * samples * heads * tokens * key.shape[2] * (width + value.shape[3])
    count: Callable[..., int] | None = flop_registry.get(func.overloadpacket)
    return 0 if count is None else count(*args, **kwargs, out_val=output)


class ChannelEvidence(OperatorMode):
    """Notes which dimension operators take for the channels of the tensors that they read and make.

    A convolution's and a batch norm's is the second, a layer norm's and a linear layer's the last. Views of a tensor
    lie in the same memory, so that a dimension of theirs is told by its size and stride in whatever order a view has
    them. Operators on single elements leave the order as it is, which counts where nothing else tells: of a sum's two
    terms one may come from a layer that mixes tokens, and took those for its channels.
    """

    def __init__(self) -> None:
        super().__init__()
        # Sizes and strides, by memory: of what is read and made, and of what follows from that.
        self._seen: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
        self._followed: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
        self._copied: dict[int, Tensor] = {}  # by memory of a copy, of which readers tell the same
        self._kept: list[Any] = []  # memory that was freed could be taken for what lay there before

    def dims_of(self, tensor: Tensor) -> set[int]:
        """Return the dimensions of a tensor that operators have taken for its channels: one, none or several."""
        if not is_plain(tensor):
            return set()
        memory = tensor.untyped_storage()._cdata
        noted = self._seen.get(memory) or self._followed.get(memory) or set()
        dims = list(zip(tensor.shape, tensor.stride(), strict=True))
        exact = {dims.index(one, 1) for one in noted if one in dims[1:]}
        if exact:
            return exact
        # A part of the channels has their stride: ShuffleNet's blocks read one half of theirs.
        by_stride = {stride: dim for dim, (size, stride) in enumerate(dims) if dim and size > 1}
        return {
            by_stride[stride] for size, stride in noted if stride in by_stride and size < dims[by_stride[stride]][0]
        }

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note what it tells."""
        output = func(*args, **(kwargs or {}))
        made = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(func, torch._ops.OpOverload) and is_plain(made):
            name = func.overloadpacket.__name__
            if name == "addmm":
                self._note(args[1], -1)
                self._note(made, -1)
            elif name in _CHANNELS_LAST or name in _CHANNELS_SECOND and made.ndim > 2:
                dim = -1 if name in _CHANNELS_LAST else 1
                self._note(args[0], dim)
                self._note(made, dim)
            elif name == "mean" and len(args) > 1 and isinstance(args[1], (list, tuple)):
                self._note_mean(args[0], args[1], keeps=len(args) > 2 and args[2])
            elif torch.Tag.pointwise in func.tags or name in _COPIES:
                self._pass_on(args, made)
                if name in _COPIES and is_plain(args[0]) and made.shape == args[0].shape:
                    self._copied[made.untyped_storage()._cdata] = args[0]
        return output

    def _note(self, tensor: Any, dim: int, *, follows: bool = False) -> None:
        if is_plain(tensor) and tensor.ndim > 1 and tensor.shape[dim] > 1:
            memory = tensor.untyped_storage()
            self._kept.append(memory)
            known = self._followed if follows else self._seen
            known[memory._cdata].add((tensor.shape[dim], tensor.stride(dim)))
            original = None if follows else self._copied.get(memory._cdata)
            if original is not None and original.shape == tensor.shape:
                self._note(original, dim)

    def _note_mean(self, tensor: Any, dims: Any, *, keeps: bool) -> None:
        """A mean over all positions leaves samples and channels; one that keeps them may belong to a norm."""
        left = set(range(tensor.ndim)) - {dim % tensor.ndim for dim in dims} - {0}
        if len(left) == 1 and (tensor.ndim == 4 or tensor.ndim == 3 and not keeps):
            self._note(tensor, left.pop())

    def _pass_on(self, args: Any, made: Tensor) -> None:
        for each in args:
            if is_plain(each) and each.shape == made.shape:
                for dim in self.dims_of(each):
                    self._note(made, dim, follows=True)
