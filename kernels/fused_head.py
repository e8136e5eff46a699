"""fused_head: the operator of one head, with gradients; registered as ``torch.ops.auxhead.fused_head``."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .before_launch import HeadInput, head_that_reads, library_adds_bias, run_before_launch
from .launch.arrival_counters import arrival_counters
from .launch.check_arguments import FLOAT_DTYPES, check_countable, check_head_arguments, check_pool, check_rule_tensors
from .launch.choose_config import choose_config
from .launch.constants import HeadConstants, LaunchConstants, LogitsConstants
from .launch.head_view import HeadView, head_view
from .launch.launch_config import LaunchConfig, most_registers
from .launch.memory import HeadArguments, strided
from .launch.residency import new_turns
from .noted import launch
from .reference.criteria import check_criterion, check_temperature, check_threshold, number_of
from .reference.fused_head import HeadOutput, backward, fused_head_reference, save_for_backward
from .reference.hidden_layers import NO_LAYERS, HiddenLayers, check_hidden_types

try:
    from .jit import exits as kernel
    from .jit.hand_over import INTERPRETED
except ImportError:  # no Triton for this platform
    kernel = None  # type: ignore[assignment]


def runs_triton(x: Tensor) -> bool:
    """Return whether kernels of Triton take ``x``, as ``fused_head(x, ...)`` does; elsewhere the reference runs.

    They compute in float32, float16 and bfloat16: float64 is PyTorch's, in the interpreter too.
    """
    if kernel is None or x.dtype not in FLOAT_DTYPES:
        return False
    return x.is_cuda or (bool(INTERPRETED) and x.device.type == "cpu")  # which is a constant of Triton's


def wants_plain_pytorch() -> bool:
    """Return whether operations of PyTorch must stand in for a kernel.

    ONNX knows no kernel of ours. The transforms of ``torch.func`` and forward-mode derivatives go operation by
    operation; those of an operator with a backward pass alone would be refused, or silently 0.
    """
    if torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export():
        return True
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def fused_head(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    pool: str = "avg",
    pool_size: int | tuple[int, int] = 1,
    criterion: str = "max_prob",
    temperature: Tensor | float = 1.0,
    threshold: Tensor | float = 1.0,
    return_probs: bool = True,
    hidden: HiddenLayers | None = None,
) -> HeadOutput:
    """Answer for a batch: pool, flatten, hidden layers if any, linear, softmax and confidence check, in one launch.

    Where that is sooner, a launch before pools, or a library multiplies and the launch only decides. Sums are float32,
    of float64 input float64. The same input gives the same output bit for bit. Any strides are read in place.
    Differentiable in x and all parameters (through ``probs`` and ``confidence``); the backward pass is plain PyTorch.

    Args:
        x: [N, C, H, W] map, [N, T, D] tokens or [N, D] pooled vectors; float32, float16 or bfloat16, on the CPU
            float64, too; any strides.
        weight: [K, features], dtype and device of x. The features of a sample are those of ``torch.flatten`` after
            the pool: C * p_h * p_w for a map, D for tokens, all elements for ``pool="none"``. After a hidden linear
            layer of H features it is [K, H].
        bias: [K], dtype and device of x, or None.
        pool: "avg" or "max": windows cut as by ``torch.nn.AdaptiveAvgPool2d(pool_size)`` (over T for tokens);
            "first": the first token; "none": flatten only. Pooled vectors are read as they are.
        pool_size: windows of a map, p or (p_h, p_w), at most 46,340 each.
        criterion: what the confidence is, larger where a head is surer: "max_prob", the largest probability;
            "margin", that less the second largest; "entropy", 1 - H / log K of the probabilities' entropy H, all three
            from 0 to 1; "energy", temperature * logsumexp(logits / temperature), of any size; or "patience", how many
            heads of a network in a row agree, which is 1 of one alone. Definitions and sources are in reference/.
        temperature: divides the logits before the softmax; a float, or a float32 tensor of one element on x's device,
            which is read on the device alone, so that changing it needs no recapture of a graph. There nobody refuses
            one that is not finite and greater than 0: probabilities and confidence are NaN, and no sample exits.
        threshold: a sample exits when its confidence is strictly greater; given like the temperature. No confidence
            but an energy exceeds the default, 1.0.
        return_probs: whether to write the probabilities.
        hidden: ReLU before the pool, and LayerNorm and linear layer with activation after it; None for none of them.

    Returns:
        HeadOutput: probs [N, K] float32, softmax(logits / temperature), or None; label [N] int64, the class of the
        largest logit, the first of equals; confidence [N] float32; exit [N] bool. A sample whose logits are not all
        finite or -inf has NaN probabilities and confidence, and never exits. Of float64 input probabilities and
        confidence are float64, and compared as such with the threshold.

    Raises:
        ValueError: a shape, device or value does not fit; names the argument, what it got and what it wants.
        TypeError: the same for a dtype or type.
    """
    layers = NO_LAYERS if hidden is None else hidden
    check_hidden_types(layers)
    check_criterion(criterion)
    if not isinstance(return_probs, bool):
        raise TypeError(f"return_probs: got {type(return_probs).__name__}, wants a bool")
    parameters = [("weight", weight), ("bias", bias), *layers.tensors()]
    rule = [one for one in (("temperature", temperature), ("threshold", threshold)) if isinstance(one[1], Tensor)]
    for name, one in (("x", x), *rule, *parameters):
        dense = isinstance(one, Tensor) and one.layout is torch.strided and not one.is_nested
        if not dense and (one is not None or name in ("x", "weight")):
            got = type(one).__name__ if not isinstance(one, Tensor) else "nested" if one.is_nested else one.layout
            other = "" if name in ("x", "weight") else " or a number" if name in dict(rule) else " or None"
            raise TypeError(f"{name}: got {got}, wants a strided torch.Tensor{other}")
    for name, value in (*parameters, *rule):
        # here, not in the op: a tensor on "meta" would send the whole call to the fake implementation
        if isinstance(value, Tensor) and value.device != x.device:
            raise ValueError(f"{name}: got device {value.device}, wants {x.device}, the device of x")
    temperature_tensor, temperature_value = _split_number("temperature", temperature)
    threshold_tensor, threshold_value = _split_number("threshold", threshold)
    head = _fused_head if wants_plain_pytorch() else torch.ops.auxhead.fused_head
    probs, label, confidence, exits = head(
        x, weight, bias, temperature_tensor, threshold_tensor, temperature_value, threshold_value,
        pool, check_pool(pool, pool_size), criterion, return_probs, *layers,
    )  # fmt: skip
    return HeadOutput(probs if return_probs else None, label, confidence, exits)


def _split_number(name: str, value: Tensor | float) -> tuple[Tensor | None, float]:
    """Split a number into the operator's two arguments: a tensor or None, and a float that counts if it is None."""
    if isinstance(value, Tensor):
        return value, 1.0
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: got {type(value).__name__}, wants a float or a torch.Tensor of one element")
    # a larger int is no float; each is refused
    return None, value if isinstance(value, float) else float(max(min(value, 10**300), -(10**300)))


# define and impl, not custom_op, whose wrappers cost the host 10 us more a call
torch.library.define(
    "auxhead::fused_head",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? temperature_tensor, Tensor? threshold_tensor, "
    "float temperature, float threshold, str pool, int[2] pool_size, str criterion, bool return_probs, "
    "bool rectifies=False, float? eps=None, Tensor? norm_weight=None, Tensor? norm_bias=None, "
    "Tensor? hidden_weight=None, Tensor? hidden_bias=None, str activation='relu') "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)


def _fused_head(
    x: Tensor, weight: Tensor, bias: Tensor | None, temperature_tensor: Tensor | None, threshold_tensor: Tensor | None,
    temperature: float, threshold: float, pool: str, pool_size: Sequence[int], criterion: str, return_probs: bool,
    *layers: Any,  # fields of HiddenLayers in their order; the dispatcher drops those that are at their default
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    grid, hidden, plain = check_pool(pool, tuple(pool_size)), HiddenLayers(*layers), wants_plain_pytorch()
    check_head_arguments(x, weight, bias, pool, grid, criterion, hidden)
    if not plain:  # which cannot read tensors' values
        check_rule_tensors(criterion, temperature_tensor, threshold_tensor, x.device)
    check_temperature(temperature)
    check_threshold(criterion, threshold)
    divisor = temperature if temperature_tensor is None else temperature_tensor
    limit = threshold if threshold_tensor is None else threshold_tensor
    if x.shape[0] == 0 and not plain:
        return _empty_output(x, weight.shape[0], return_probs)
    if plain or not runs_triton(x):
        output = fused_head_reference(
            x, weight, bias, pool=pool, pool_size=grid, temperature=divisor, threshold=limit, criterion=criterion,
            hidden=hidden,
        )  # fmt: skip
    else:
        check_countable(x, hidden.first_weight(weight).shape[1])
        view, pool_max = head_view(x.shape, x.stride(), pool, grid), pool == "max"
        config = choose_config(view, weight.shape[0], pool_max=pool_max, dtype=x.dtype, device=x.device, hidden=hidden)
        output = launch_fused_head(
            x, view, weight, bias, divisor, limit, pool_max=pool_max, return_probs=return_probs, config=config,
            criterion=criterion, hidden=hidden,
        )  # fmt: skip
        arrival_counters(x.device).launched()
    probs = output.probs if return_probs and output.probs is not None else output.confidence.new_empty(0)
    return probs, output.label, output.confidence, output.exit


torch.library.impl("auxhead::fused_head", "default", _fused_head)
#: Constants and compiled kernel of launches, by all that they depend on.
_compiled: dict[tuple[Hashable, ...], tuple[LaunchConstants, Any]] = {}


def launch_fused_head(
    x: Tensor, view: HeadView, weight: Tensor, bias: Tensor | None, temperature: Tensor | float,
    threshold: Tensor | float, *, pool_max: bool, return_probs: bool, config: LaunchConfig, criterion: str = "max_prob",
    hidden: HiddenLayers = NO_LAYERS,
) -> HeadOutput:  # fmt: skip
    """Launch one head, whose arguments ``fused_head`` has checked; N is at least 1.

    ``view`` is that of x; the other arguments are those of :func:`auxhead.kernels.fused_head`.
    """
    samples, classes = view.shape[0], weight.shape[0]
    (read,) = run_before_launch([HeadInput(x, view, weight, bias, hidden, config, pool_max)])
    view, config, hidden, pool_max = head_that_reads(view, config, hidden, pool_max=pool_max)
    programs = config.programs(view, classes, hidden)
    probs, label, confidence, exits = _empty_output(x, classes, return_probs)
    output = HeadOutput(probs if return_probs else None, label, confidence, exits)
    zeros = arrival_counters(x.device).take(programs.zeroed + 1)
    grid = min(config.max_programs or programs.total, programs.total)
    residency = new_turns(programs.total, grid, config.num_warps, x.device)
    rule: tuple[Any, Any] = (temperature, threshold)
    with torch.cuda.device_of(x):
        if config.by_library:
            place: tuple[Any, ...] = ((strided(read), strided(None if library_adds_bias(config, x) else bias), rule), 0)
        else:
            of_head = HeadArguments.of(read, view, weight, bias, hidden, rule, config, programs, zeros[:-1])
            place = (tuple(of_head), None)
        # Everything by which Triton chooses a compiled kernel; its own look-up is half of a launch's time on the host.
        parameters = (weight, bias, *(tensor for _, tensor in hidden.tensors()))
        pointers = tuple(t is None or t.data_ptr() % 16 for t in (read, *parameters))
        rules = tuple(t.data_ptr() % 16 if isinstance(t, Tensor) else None for t in (temperature, threshold))
        strides = tuple(t is None or t.stride() for t in parameters)
        key = (
            x.device, x.dtype, view, classes, strides, pointers, rules, pool_max, return_probs, config,
            residency is None, criterion, hidden.rectifies, hidden.eps is None, hidden.rows(classes),
            hidden.activation_number,
        )  # fmt: skip
        constants, compiled = _compiled.get(key) or (None, None)
        if constants is None:
            own: HeadConstants | LogitsConstants = LogitsConstants(number_of(criterion))
            if not config.by_library:
                own = HeadConstants.of(config, view, weight, pool_max=pool_max, criterion=criterion, hidden=hidden)
            constants = LaunchConstants((own,), classes, grid < programs.total)
        arguments = (
            (place,), tuple(output),
            None, None, (None, None, zeros[-1:]), None, None, None,  # nothing is merged
            programs.total, residency, samples, constants,
        )  # fmt: skip
        registers = most_registers(config.num_warps, config.max_registers)
        options = {} if compiled else {"num_warps": config.num_warps, "maxnreg": registers}
        _compiled[key] = constants, launch(kernel.exit_kernel, (grid, 1, 1), arguments, options, compiled)
    return output


def _empty_output(x: Tensor, classes: int, return_probs: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    samples, dtype = x.shape[0], torch.promote_types(x.dtype, torch.float32)
    return (
        x.new_empty((samples, classes) if return_probs else 0, dtype=dtype),
        x.new_empty(samples, dtype=torch.int64),
        x.new_empty(samples, dtype=dtype),
        x.new_empty(samples, dtype=torch.bool),
    )


@torch.library.register_fake("auxhead::fused_head")
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, weight, bias, _, _, _, _, pool, pool_size, criterion, return_probs, *layers = arguments
    check_head_arguments(x, weight, bias, pool, check_pool(pool, tuple(pool_size)), criterion, HiddenLayers(*layers))
    return _empty_output(x, weight.shape[0], return_probs)


torch.library.register_autograd("auxhead::fused_head", backward, setup_context=save_for_backward)
