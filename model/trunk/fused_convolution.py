"""``FusedConvolution``: a convolution with batch norm, sum and activation, in one launch if Triton or cuDNN can."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from ...kernels import FOLLOWING, fused_conv2d, takes_convolution
from ...kernels.convolution import compiled_for, fused_conv2d_operator, products
from .timed_convolutions import off_by, prefers_triton

#: Channels in which the first convolution of three reads a batch sooner: ResNet's takes 12, 21, 61 and 208 us at batch
#: 1, 8, 32 and 128, and not 16, 50, 84 and 302 (H100).
PADDED_CHANNELS = 4
#: Samples, at most, of which a compiler is given products and sums for a convolution of one position.
MOST_PRODUCTS = 32


def copied_to(place: Tensor, part: Tensor) -> Tensor:
    """Copy a part of a concatenation to its place, which is returned; raises what ``torch.cat`` does of other sizes."""
    if place.shape != part.shape:
        sizes = f"got {list(part.shape)} where {list(place.shape)} belongs"
        raise RuntimeError(f"Sizes of tensors must match but in the dimension that they are concatenated by: {sizes}")
    return place.copy_(part)


def has_cudnn(x: Tensor) -> bool:
    """Return whether a convolution of ``x`` may go to cuDNN."""
    return x.device.type == "cuda" and torch.backends.cudnn.enabled


class FusedConvolution(nn.Module):
    """``conv -> batch norm -> (+ z) -> activation`` with the batch norm folded into the weights.

    Where a convolution of Triton's or, with a ReLU, of cuDNN's takes it (:meth:`choose`), sum, bias and activation cost
    no launch of their own; elsewhere it is a plain convolution with what is left of the others behind it. Where nothing
    changes the weight, it is the source's own parameter; otherwise weight and bias are copies, which :meth:`refresh`
    brings up to date.
    """

    weight: Tensor
    bias: Tensor | None
    padded: Tensor | None
    """The weight for inputs of more channels, zeros there; None if it takes none."""
    windows: Tensor | None
    """The weight in the order in which Triton reads it; None if it lies so."""

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d | None = None) -> None:
        """Fold ``norm``, whose running statistics are used, into ``conv``; neither is changed."""
        super().__init__()
        self.following = ""
        """The activation behind it, a name of ``FOLLOWING``."""
        self.fused = False
        """True if it runs as one launch of cuDNN, unless Triton takes it."""
        self.in_triton = False
        """True if it runs as one launch of Triton."""
        self.scales = False
        """True if it is the batch norm alone."""
        self.sum = ""
        """How z is added: it decides dtype and memory of the sum, as the order of summands does."""
        self.compiled = False
        """True if a compiler gets it, which knows no launch of ours."""
        # In a tuple, lest the sources become submodules: they are the user's.
        self._sources = (conv, norm)
        self._bias_giver: tuple[FusedConvolution, ...] = ()
        self.gives_bias = False
        self.groups = conv.groups
        # which a user may have set to numbers, or lists of them
        self.stride, self.padding, self.dilation = map(_pair, (conv.stride, conv.padding, conv.dilation))
        for name, own, folded in zip(("weight", "bias"), (conv.weight, conv.bias), self._folded(), strict=True):
            if folded is not own:
                self.register_buffer(name, folded, persistent=False)
            elif own is None:
                self.register_parameter(name, None)
            else:
                setattr(self, name, own)
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

    def may_take_bias_of(self, other: "FusedConvolution") -> bool:
        """Return whether another one makes numbers of the same dtype, in as many channels; norms keep their biases."""
        mine, its = self._sources[0].weight, other._sources[0].weight
        return mine.dtype == its.dtype and len(mine) == len(its) and not (self.scales or other.scales)

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
                wide = None if bias is None else bias.to(torch.promote_types(bias.dtype, torch.float32))
                bias = given.clone() if wide is None else wide + given
        return (
            weight.to(dtype).contiguous(memory_format=torch.channels_last),
            None if bias is None else bias.to(dtype),
        )

    @torch.no_grad()
    def refresh(self) -> None:
        """Fold again, in place, from what the sources hold now."""
        with torch.inference_mode(False), torch.no_grad():  # the first switches gradients on
            for name, now in zip(("weight", "bias"), self._folded(), strict=True):
                mine = self._buffers.get(name)  # a parameter is the user's
                if mine is not None and now is not None:
                    mine.copy_(now)
            if self.padded is not None:
                self.padded[:, : self.weight.shape[1]].copy_(self.weight)
            if self.windows is not None:
                self.windows.copy_(self.weight)

    @torch.no_grad()
    def choose(self, x: Tensor, z: Tensor | None = None) -> str | None:
        """Use Triton's or cuDNN's fused convolution if it takes this input and agrees with the plain one.

        Where both do, Triton's if it takes no longer; so too without a ReLU, which cuDNN wants: there it must take no
        longer than the convolution and one launch for what follows, as a compiler makes it.

        Returns:
            Why neither is used; None if one is, or there is nothing to fuse.
        """
        self.fused, self.in_triton, self.windows = False, False, None
        refused = self._choose_cudnn(x, z)
        if self._prefers_triton(x, z):
            self.in_triton, self.windows = True, self._windows()
            return None
        return refused

    def in_triton_by(self, x: Tensor, z: Tensor | None = None) -> tuple[Hashable, Callable[[], Tensor]] | None:
        """Return what Triton compiles for this input, and its convolution; None where it does not take it.

        Nor where a compiler fuses it: see :func:`_of_one_position`.
        """
        windows, sizes, bias = self._windows(), self._sizes(), None if self.gives_bias else self.bias
        weight = self.weight if windows is None else windows
        if isinstance(self.padding, str) or self._is_for_compiler(x) or not (z is None or isinstance(z, Tensor)):
            return None
        if not self._fits(x):
            return None
        if not takes_convolution(x, weight, bias, sizes, self.groups, z):
            return None
        given = x, weight, bias, sizes, self.groups, self.following, z
        key = compiled_for(*given), self.compiled
        return key, partial(fused_conv2d, *given, begins_early=self.compiled)

    def _prefers_triton(self, x: Tensor, z: Tensor | None) -> bool:
        """Return whether Triton's convolution takes this input, agrees with the other one and is no slower."""
        found = self.in_triton_by(x, z)
        if found is None:
            return False
        # not __call__: this may be running in a hook of it
        others = partial(self.forward, x, z) if self.fused else partial(self._in_two_launches, x, z)
        lies = x.stride(), self.weight.stride()
        kind = x.shape, self.weight.shape, lies, *self._sizes(), self.groups, self.fused
        count = None if self.is_depthwise else products(x, self.weight, self._sizes())
        return prefers_triton(*found, self.forward(x, z), others, kind, count)

    def _in_two_launches(self, x: Tensor, z: Tensor | None) -> Tensor:
        """Take as long as the convolution does with what a compiler launches behind it."""
        y = F.conv2d(x, self.weight, None, *self._sizes(), self.groups)
        return FOLLOWING[self.following](y) if self.following or z is None else y + z

    def _is_for_compiler(self, x: Tensor) -> bool:
        one_position = (*x.shape[2:], *self.weight.shape[2:]) == (1, 1, 1, 1)
        is_product = one_position and self.groups == 1 and self.padding in ((0, 0), "same", "valid")
        return self.compiled and is_product and not torch.is_autocast_enabled(x.device.type)

    def _fits(self, x: Tensor) -> bool:
        """Return whether PyTorch takes x by its dtype: a norm of float32 takes maps of half precision, too."""
        norm: Any = self._sources[1]
        own = norm.running_mean.dtype if self.scales else self.weight.dtype
        return x.dtype == own or (self.scales and own == torch.float32)

    def _sizes(self) -> tuple[Any, Any, Any]:
        return self.stride, self.padding, self.dilation

    def _windows(self) -> Tensor | None:
        """Return a copy of the weight in the order in which Triton reads it, None if it lies so."""
        weight = self.weight.detach()
        if self.is_depthwise:
            return weight.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)
        if weight.is_contiguous(memory_format=torch.channels_last):
            return None
        return weight.contiguous(memory_format=torch.channels_last)

    def _choose_cudnn(self, x: Tensor, z: Tensor | None) -> str | None:
        """Use cuDNN's fused convolution if it can; returns why it is not used, None if there is nothing to fuse."""
        if self.following != "relu":
            return None
        if not has_cudnn(x):
            return "cuDNN's fused convolutions need cuDNN and a CUDA device"
        if isinstance(self.padding, str):
            return f"padding={self.padding!r} is not a number"
        if self.is_depthwise:
            return "depthwise convolutions are faster unfused"
        if not (z is None or isinstance(z, Tensor)):
            return f"the summand is {z!r:.40}"
        plain = self.forward(x, z)  # not __call__: this may be running in a hook of it
        if z is not None and (z.shape != plain.shape or z.dtype != plain.dtype):
            return f"the summand {list(z.shape)} of {z.dtype} is not like the output {list(plain.shape)}"
        self.fused = True
        try:
            # Memory that is freed here is what the output lies in next: cuDNN's sum has it as a summand with factor 0.
            torch.full_like(plain, float("nan"))
            found = self.forward(x, z)
        except RuntimeError as refused:
            self.fused = False
            return f"cuDNN: {str(refused).splitlines()[0]}"
        error = off_by(found, plain)
        self.fused = error is None
        return None if self.fused else f"cuDNN's fused convolution is off by {error:.3g}"

    def forward(self, x: Tensor, z: Tensor | None = None, into: Tensor | None = None) -> Tensor:
        """Convolve x [N, C, H, W]; add z, of the output's shape, and apply the activation, if there are.

        The result is written ``into`` memory that is given, and that is returned.
        """
        bias = None if self.gives_bias else self.bias
        others: tuple[Any, ...] = (bias, self.stride, self.padding, self.dilation, self.groups)
        # as many channels a plain convolution would refuse
        padded = self.padded is not None and x.shape[1] == PADDED_CHANNELS
        weight: Any = self.padded if padded else self.weight
        if self.in_triton and not padded and self._fits(x) and not torch.compiler.is_dynamo_compiling():
            in_order = weight if self.windows is None else self.windows
            # or goes on: of what lies otherwise than what it has chosen for, only that knows how z is added
            if takes_convolution(x, in_order, bias, others[1:4], self.groups, z, into):
                if self.compiled:
                    sizes = map(list, others[1:4])
                    return fused_conv2d_operator(x, in_order, bias, *sizes, self.groups, self.following, z, True)
                return fused_conv2d(x, in_order, bias, others[1:4], self.groups, self.following, z, into)
        if into is not None:
            return copied_to(into, self.forward(x, z))
        if self.fused and (z is None or len(z) == len(x)):  # of another batch than it has chosen for it may not be
            if self.compiled:
                return _fused_operator(x, weight, z, bias, *map(list, others[1:4]), self.groups)
            return _fused(x, weight, z, *others)
        if self.scales:
            norm: Any = self._sources[1]
            y = F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)
        else:
            y = _of_one_position(x, weight, bias) if self._is_for_compiler(x) else F.conv2d(x, weight, *others)
        if z is not None:
            y = z + y if self.sum == "summand first" else y.add_(z) if self.sum == "in place" else y + z
        return FOLLOWING[self.following](y)

    def extra_repr(self) -> str:
        """Show what is in it."""
        launch = "triton" if self.in_triton else "cudnn" if self.fused else "plain"
        return f"{launch}, norm={self.folds_norm}, following={self.following!r}, stride={self.stride}"


def _pair(given: Any) -> Any:
    """Return a number twice, and numbers in a tuple, of whatever type; a text as it is."""
    if isinstance(given, str):
        return given
    return tuple(map(int, given)) if isinstance(given, Sequence) else (int(given), int(given))


def scaling_by(norm: nn.BatchNorm2d) -> FusedConvolution:
    """Return a batch norm as a depthwise convolution by windows of one, where Triton takes that; else it is itself.

    Its factors are of float32, as the norm's: rounded, those of a large mean would be off by more than its output is.
    """
    assert norm.running_mean is not None
    channels = norm.num_features
    like = {"device": norm.running_mean.device, "dtype": torch.promote_types(norm.running_mean.dtype, torch.float32)}
    # without initial values, for which random numbers would be drawn
    conv = nn.utils.skip_init(nn.Conv2d, channels, channels, 1, groups=channels, bias=False, **like)
    nn.init.ones_(conv.weight)
    scaling = FusedConvolution(conv, norm)
    scaling.scales = True
    return scaling


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
