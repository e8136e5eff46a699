"""``FusedConvolution``: a convolution with the batch norm, sum and ReLU behind it, in one launch of cuDNN if it can."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from ...kernels import FOLLOWING, depthwise_conv2d, depthwise_operator, takes_depthwise
from ..basics.streams import OwnedLock

#: cuDNN's fused convolution has to agree with the plain one this well, relative to the largest output; the trunk as a
#: whole is checked much more strictly.
COARSE_TOLERANCE = 2**-5
#: Channels in which the first convolution of three reads a batch sooner: ResNet's takes 12, 21, 61 and 208 us at batch
#: 1, 8, 32 and 128, and not 16, 50, 84 and 302 (H100).
PADDED_CHANNELS = 4
#: Samples, at most, of which a compiler is given products and sums for a convolution of one position.
MOST_PRODUCTS = 32
#: Samples of a batch from which on cuDNN's algorithms are timed.
LEAST_TIMED_BATCH = 16
#: Who has cuDNN time its algorithms just now, and the user's own setting: ``cudnn.benchmark`` is one for all threads.
_timing: set[object] = set()
_before = False
_SETTING = OwnedLock()


def has_cudnn(x: Tensor) -> bool:
    """Return whether a convolution of ``x`` may go to cuDNN."""
    return x.device.type == "cuda" and torch.backends.cudnn.enabled


@contextmanager
def fastest_convolutions(samples: int) -> Iterator[None]:
    """Let cuDNN time its algorithms for each convolution of a batch that is new to this thread, and keep the fastest.

    Later ones of the same sizes take the same algorithm. Small batches are left to cuDNN's rules: timed alone,
    convolutions cut into several launches look faster than they are one after another (on an H200 ResNet-18 takes 170
    us at batch 1 with them and 160 without; at 32, 457 with what is timed and 503 without). And where PyTorch is asked
    to be deterministic nothing is timed, since two processes might find different ones the fastest.
    """
    global _before
    cudnn = torch.backends.cudnn
    if samples < LEAST_TIMED_BATCH or cudnn.deterministic or torch.are_deterministic_algorithms_enabled():
        yield
        return
    this = object()
    try:
        with _SETTING:
            if not _timing:
                _before = cudnn.benchmark
            _timing.add(this)
            cudnn.benchmark = True
        yield
    finally:
        with _SETTING:
            if this in _timing:
                _timing.remove(this)
                if not _timing:
                    cudnn.benchmark = _before


class FusedConvolution(nn.Module):
    """``conv -> batch norm -> (+ z) -> ReLU`` with the batch norm folded into the weights.

    Where cuDNN's fused convolution takes it (:meth:`choose`), sum, bias and ReLU cost no launch of their own; nor do
    bias and activation behind a depthwise one in Triton; elsewhere it is a plain convolution with what is left of the
    others behind it. Where nothing changes the weight, it is the
    source's own parameter; otherwise weight and bias are copies, which :meth:`refresh` brings up to date.
    """

    weight: Tensor
    bias: Tensor | None
    padded: Tensor | None
    """The weight for inputs of more channels, zeros there; None if it takes none."""
    windows: Tensor | None
    """The weight in the order in which a depthwise convolution in Triton reads it; None if it is none."""

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d | None = None) -> None:
        """Fold ``norm``, whose running statistics are used, into ``conv``; neither is changed."""
        super().__init__()
        self.relu = False
        self.following = ""
        """What follows a depthwise convolution, a name of ``FOLLOWING``."""
        self.fused = False
        self.compiled = False
        # In a tuple, lest the sources become submodules: they are the user's.
        self._sources = (conv, norm)
        self._bias_giver: tuple[FusedConvolution, ...] = ()
        self.gives_bias = False
        self.stride, self.dilation, self.groups = conv.stride, conv.dilation, conv.groups
        self.padding = conv.padding
        for name, own, folded in zip(("weight", "bias"), (conv.weight, conv.bias), self._folded(), strict=True):
            if folded is own:
                setattr(self, name, own)
            else:
                self.register_buffer(name, folded, persistent=False)
        for name in ("padded", "windows"):
            self.register_buffer(name, None, persistent=False)

    def pad(self) -> None:
        """Take inputs of :data:`PADDED_CHANNELS`, too, of which those that the source does not have count for nothing.

        cuDNN pads three channels of half precision by itself at each call, in two launches.
        """
        weight = self.weight.detach()
        padded = F.pad(weight, (0, 0, 0, 0, 0, PADDED_CHANNELS - weight.shape[1]))
        self.padded = padded.contiguous(memory_format=torch.channels_last)

    @property
    def folds_norm(self) -> bool:
        """True if a batch norm is in the weights."""
        return self._sources[1] is not None

    @property
    def is_depthwise(self) -> bool:
        """True if each channel is convolved by itself."""
        return 1 < self.groups == len(self.weight) and self.weight.shape[1] == 1

    def take_bias_of(self, other: "FusedConvolution") -> None:
        """Add the bias of ``other``, whose output is this one's summand, here, where it costs no launch."""
        if other.bias is None:
            return
        self._bias_giver = (other,)
        other.gives_bias = True
        del self.bias
        self.register_buffer("bias", self._folded()[1], persistent=False)

    def _exact(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias with the batch norm in them, in float32 at least; without that of another."""
        conv, norm = self._sources
        if norm is None:
            return conv.weight, conv.bias
        wide = torch.promote_types(conv.weight.dtype, torch.float32)
        given = conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.weight, norm.bias
        stored: list[Any] = [None if each is None else each.detach().to(wide) for each in given]
        weight, bias, mean, variance, scale, shift = stored
        weight, bias = fuse_conv_bn_weights(weight, bias, mean, variance, norm.eps, scale, shift)
        return weight.detach(), bias.detach()

    @torch.no_grad()
    def _folded(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias as they are run, rounded once, with the bias of a summand."""
        dtype = self._sources[0].weight.dtype
        weight, bias = self._exact()
        for given in (giver._exact()[1] for giver in self._bias_giver):
            if given is not None:
                bias = given if bias is None else bias.to(torch.promote_types(bias.dtype, torch.float32)) + given
        return (
            weight.to(dtype).contiguous(memory_format=torch.channels_last),
            None if bias is None else bias.to(dtype),
        )

    @torch.no_grad()
    def refresh(self) -> None:
        """Fold again, in place, from what the sources hold now."""
        with torch.inference_mode(False), torch.no_grad():  # the first switches gradients on
            for mine, now in zip((self.weight, self.bias), self._folded(), strict=True):
                if mine is not None and now is not None and now is not mine:
                    mine.copy_(now)
            if self.padded is not None:
                self.padded[:, : self.weight.shape[1]].copy_(self.weight)
            if self.windows is not None:
                self.windows.copy_(self.weight)

    @torch.no_grad()
    def choose(self, x: Tensor, z: Tensor | None = None) -> str | None:
        """Use Triton's depthwise or cuDNN's fused convolution if it takes this input and agrees with the plain one.

        Returns:
            Why neither is used; None if one is, or there is nothing to fuse.
        """
        self.fused, self.windows = False, None
        if self.is_depthwise and z is None and not isinstance(self.padding, str):
            windows = self.weight.detach().permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)
            if takes_depthwise(x, windows, (self.stride, self.padding, self.dilation)):
                plain, self.windows = self.forward(x), windows
                error = (self.forward(x).float() - plain.float()).abs().max().item()
                if error <= COARSE_TOLERANCE * plain.float().abs().max().item():
                    return None
                self.windows = None
        if not self.relu:
            return None
        if not has_cudnn(x):
            return "cuDNN's fused convolutions need cuDNN and a CUDA device"
        if isinstance(self.padding, str):
            return f"padding={self.padding!r} is not a number"
        if self.is_depthwise:
            return "depthwise convolutions are faster unfused"
        plain = self.forward(x, z)  # not __call__: this may be running in a hook of it
        if z is not None and (z.shape != plain.shape or z.dtype != plain.dtype):
            return f"the summand {list(z.shape)} of {z.dtype} is not like the output {list(plain.shape)}"
        self.fused = True
        try:
            # Memory that is freed here is what the output lies in next: cuDNN's sum has it as a summand with factor 0.
            torch.full_like(plain, float("nan"))
            error = (self.forward(x, z).float() - plain.float()).abs().max().item() if plain.numel() else 0.0
        except RuntimeError as refused:
            self.fused = False
            return f"cuDNN: {str(refused).splitlines()[0]}"
        self.fused = error <= COARSE_TOLERANCE * plain.float().abs().max().item() if plain.numel() else False
        return None if self.fused else f"cuDNN's fused convolution is off by {error:.3g}"

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Convolve x [N, C, H, W]; add z, of the output's shape, if there is one; apply the ReLU if there is one."""
        bias = None if self.gives_bias else self.bias
        others: tuple[Any, ...] = (bias, self.stride, self.padding, self.dilation, self.groups)
        # as many channels as a plain convolution would refuse
        weight = self.weight if self.padded is None or x.shape[1] != PADDED_CHANNELS else self.padded
        if self.fused:
            if self.compiled:
                return _fused_operator(x, weight, z, bias, *map(list, others[1:4]), self.groups)
            return _fused(x, weight, z, *others)
        if self.windows is not None and z is None:
            sizes: Any = (self.stride, self.padding, self.dilation)
            following = "relu" if self.relu else self.following
            if self.compiled:
                return depthwise_operator(x, self.windows, bias, *map(list, sizes), following)
            return depthwise_conv2d(x, self.windows, bias, sizes, following)
        one_position = (*x.shape[2:], *weight.shape[2:]) == (1, 1, 1, 1) and self.padding in ((0, 0), "same", "valid")
        if self.compiled and one_position and self.groups == 1:
            y = _of_one_position(x, weight, bias)
        else:
            y = F.conv2d(x, weight, *others)
        if z is not None:
            y = y + z
        return F.relu(y) if self.relu else FOLLOWING[self.following](y)

    def extra_repr(self) -> str:
        """Show what is in it."""
        return f"norm={self.folds_norm}, relu={self.relu}, fused={self.fused}, stride={self.stride}"


def _of_one_position(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the convolution of maps of one position by windows of one, as in a squeeze-and-excitation.

    Of few samples as products and sums, which Inductor fuses with what is before and behind them; else as a matrix
    product.
    """
    x, weight = x.flatten(1), weight.flatten(1)
    if len(x) > MOST_PRODUCTS:
        return F.linear(x, weight, bias)[:, :, None, None]
    wide = torch.promote_types(x.dtype, torch.float32)
    y = (x.to(wide)[:, None] * weight.to(wide)).sum(2)
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)[:, :, None, None]


def _fused(x: Tensor, weight: Tensor, z: Tensor | None, *others: Any) -> Tensor:
    """Launch cuDNN's convolution with bias, sum and ReLU."""
    if z is None:
        return torch.cudnn_convolution_relu(x, weight, *others)
    return torch.cudnn_convolution_add_relu(x, weight, z, 1.0, *others)


@torch.library.custom_op("auxhead::fused_convolution", mutates_args=())
def _fused_operator(
    x: Tensor,
    weight: Tensor,
    z: Tensor | None,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """Launch as :func:`_fused`: what a compiler is given, which has no rule for cuDNN's own operators."""
    y = _fused(x, weight, z, bias, stride, padding, dilation, groups)
    return y.contiguous(memory_format=torch.channels_last)  # of a map that lies otherwise it is not


@_fused_operator.register_fake
def _(x, weight, z, bias, stride, padding, dilation, groups):  # type: ignore[no-untyped-def]
    y = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    return torch.empty_like(y, memory_format=torch.channels_last)
