"""``ExitRule``: criterion, threshold and temperature by which a head may answer, held on the device."""

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...kernels import CRITERIA, HeadOutput, decide
from ...kernels.reference.criteria import check_criterion, check_temperature, check_threshold, number_of
from ..basics.arguments import kind_of
from .rule_order import WRITING, ordered_write, wait_for_write


class ExitRule(nn.Module):
    """The rule by which one head lets a sample exit: confidence > threshold.

    The kernel reads threshold and temperature from device memory, and assigning to an attribute writes that memory in
    place: neither a changed threshold nor a disabled exit needs a recapture of a graph. They stay float32 when a model
    is cast, to float64 too, and may be read on the host without a synchronisation. What others write into that memory
    (an average of models, a broadcast of buffers) is what the attributes say from then on; on a CUDA device if it is
    written by an operator of PyTorch, and the host waits for it once. All four values travel with a state_dict, as one
    float64 tensor; a state_dict without them leaves the rule as it is, with a warning.
    """

    temperature_tensor: Tensor
    threshold_tensor: Tensor

    def __init__(
        self,
        threshold: float | None = None,
        *,
        criterion: str = "max_prob",
        temperature: float = 1.0,
        enabled: bool = True,
    ) -> None:
        """Make a rule.

        Args:
            threshold: a sample exits when its confidence is strictly greater; in the range of the criterion
                (``auxhead.kernels.CRITERIA``), from 0 to 1 for all but "energy" and "patience". None is the end of
                that range, which no confidence exceeds: 1.0 never exits.
            criterion: what the confidence is: "max_prob", "entropy", "margin" or "energy", see
                :func:`auxhead.kernels.fused_head`; or "patience", how many heads of the network in a row, ending with
                this one, gave the same label: under threshold t a label must have stayed the same t times, as with the
                patience t of PABEE. Other than the numbers it is part of what a runner captures.
            temperature: divides the logits before the softmax; greater than 0.
            enabled: False never exits, whatever the threshold.

        Raises:
            ValueError: a value out of range.
            TypeError: a value of another type.
        """
        super().__init__()
        check_criterion(criterion)
        if not isinstance(threshold, (int, float, type(None))):
            raise TypeError(f"threshold: got {kind_of(threshold)}, wants a number, or None never to exit")
        threshold = CRITERIA[criterion].high if threshold is None else threshold
        check_temperature(temperature)
        check_threshold(criterion, threshold)
        self.criterion = list(CRITERIA)[number_of(criterion)]  # this very object, by which a change is told
        with torch.inference_mode(False):  # what is made in inference mode could not be written outside of it
            self.register_buffer("temperature_tensor", torch.ones((), dtype=torch.float32), persistent=False)
            self.register_buffer("threshold_tensor", torch.ones((), dtype=torch.float32), persistent=False)
        self._temperature, self._threshold, self._enabled = float(temperature), float(threshold), _checked(enabled)
        self._write()

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse for its tensors what heads could not read as they do, or the attributes could not follow."""
        if name in ("temperature_tensor", "threshold_tensor"):
            scalar = isinstance(value, Tensor) and value.dtype == torch.float32 and not value.ndim
            if not scalar or isinstance(value, nn.Parameter):
                got = f"shape {list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else kind_of(value)
                got = "a parameter" if scalar else got
                raise TypeError(f"{name}: got {got}, wants a float32 tensor of one number, which is no parameter")
        super().__setattr__(name, value)

    def depends_on(self) -> list[tuple[Mapping[str, Any], str]]:
        """Name the objects that a launch depends on, as keys of the dicts that hold them."""
        return [(self._buffers, "temperature_tensor"), (self._buffers, "threshold_tensor"), (vars(self), "criterion")]

    @property
    def temperature(self) -> float:
        """The divisor of the logits before the softmax; assigning updates the device."""
        self._catch_up()
        return self._temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        check_temperature(value)
        self._set("_temperature", float(value))

    @property
    def threshold(self) -> float:
        """The number that the confidence must exceed; assigning updates the device."""
        self._catch_up()
        return self._threshold

    @threshold.setter
    def threshold(self, value: float) -> None:
        check_threshold(self.criterion, value)
        self._set("_threshold", float(value))

    @property
    def enabled(self) -> bool:
        """True if samples may exit here; assigning updates the device."""
        self._catch_up()
        return self._enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._set("_enabled", _checked(value))

    def _set(self, name: str, value: float) -> None:
        with WRITING:
            self._catch_up()
            setattr(self, name, value)
            self._write()

    def assign(self, other: "ExitRule | float") -> None:
        """Take over all values of another rule, or a number as the threshold alone; updates the device."""
        if not isinstance(other, ExitRule):
            self.threshold = other
            return
        with WRITING:
            self.criterion, self._enabled = other.criterion, other.enabled
            self._temperature, self._threshold = other.temperature, other.threshold
            self._write()

    def _in_force(self) -> list[float]:
        """Return what the tensors hold, as float32: no confidence exceeds the end of its range."""
        limit = self._threshold if self._enabled else CRITERIA[self.criterion].high
        return [float(np.float32(self._temperature)), float(np.float32(limit))]

    def judge(self, logits: Tensor, *, return_probs: bool) -> HeadOutput:
        """Answer by logits [N, K], by PyTorch's operators, with the values that were assigned last."""
        read = None if torch.compiler.is_compiling() else wait_for_write(self, logits)
        output = decide(logits, self.temperature_tensor, self.threshold_tensor, self.criterion)
        if read is not None:
            read.record(torch.cuda.current_stream(logits.device))
        return output if return_probs else output._replace(probs=None)

    def _write(self) -> None:
        tensors = [self.temperature_tensor, self.threshold_tensor]
        with torch.no_grad(), ordered_write(self, tensors):
            for tensor, value in zip(tensors, self._in_force(), strict=True):
                tensor.fill_(value)
            self._seen = self._versions()

    def _versions(self) -> tuple[int, ...]:
        return tuple(fact for each in self._buffers.values() for fact in (id(each), each._version))  # type: ignore[union-attr]

    def _catch_up(self) -> None:
        """Take over what others have written to the tensors, and leave the rest, which is exact, as it is."""
        held = self.threshold_tensor
        if type(held) is not Tensor or held.is_meta or torch.compiler.is_compiling():
            return
        if not held.is_cpu and self._seen == self._versions():  # reading would let the host wait
            return
        with WRITING:
            # tolist: a read of the host alone, which no mode takes for an operator of the network
            found: list[Any] = [self.temperature_tensor.tolist(), held.tolist()]
            temperature, threshold = found
            own_temperature, own_threshold = self._in_force()
            if temperature != own_temperature:
                self._temperature = temperature
            if threshold != own_threshold:
                self._threshold, self._enabled = threshold, True
            self._seen = self._versions()

    @property
    def numbers(self) -> tuple[float, float, float, float]:
        """Its values: index of the criterion in ``CRITERIA``, threshold, temperature, and whether it is enabled."""
        return float(number_of(self.criterion)), self.threshold, self.temperature, float(self.enabled)

    def get_extra_state(self) -> Tensor:
        """Return :attr:`numbers` for a state_dict, float64.

        A tensor, and always of four numbers: what reads a state_dict (safetensors, distributed checkpoints, averages)
        takes it like any other.
        """
        return torch.tensor(self.numbers, dtype=torch.float64, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Take over what :meth:`get_extra_state` returned; raises ``ValueError`` for anything else."""
        if not isinstance(state, Tensor) or state.shape != (4,):
            got = f"shape {list(state.shape)}" if isinstance(state, Tensor) else type(state).__name__
            raise ValueError(f"got {got}, wants the four numbers of ExitRule.get_extra_state")
        criterion, threshold, temperature, enabled = state.tolist()
        if criterion not in range(len(CRITERIA)):
            raise ValueError(f"criterion: got number {criterion}, wants one of 0 to {len(CRITERIA) - 1}")
        name = list(CRITERIA)[int(criterion)]
        self.assign(ExitRule(threshold, criterion=name, temperature=temperature, enabled=bool(enabled)))

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        _metadata: Any,
        _strict: bool,
        _missing: list[str],
        _unexpected: list[str],
        errors: list[str],
    ) -> None:
        key = f"{prefix}_extra_state"
        if key not in state_dict:
            warnings.warn(
                "state_dict: has no exit rules, as that of a plain classifier has none; heads keep the rules that they "
                "have",
                stacklevel=1,  # one place for all heads: Python shows the warning once
            )
            return
        try:
            self.set_extra_state(state_dict[key])
        except ValueError as error:
            errors.append(f"{key}: {error}")

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the tensors: a copy, in another process too, has its own."""
        self._catch_up()
        buffers = {name: tensor.device for name, tensor in self._buffers.items() if tensor is not None}
        return {**self.__dict__, "_buffers": buffers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make the tensors anew, on the device where those of the original are."""
        devices: dict[str, torch.device] = state["_buffers"]
        super().__setstate__({**state, "_buffers": {}})
        with torch.inference_mode(False):
            for name, device in devices.items():
                self._buffers[name] = torch.ones((), dtype=torch.float32, device=device)
        self._write()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ExitRule":
        self._catch_up()
        with torch.inference_mode(False):
            super()._apply(fn, recurse)
            self.temperature_tensor = self.temperature_tensor.float()
            self.threshold_tensor = self.threshold_tensor.float()
        self._write()  # a cast to half precision has rounded them
        return self

    def extra_repr(self) -> str:
        """Show the rule as its constructor takes it."""
        return (
            f"threshold={self.threshold}, criterion={self.criterion!r}, temperature={self.temperature}, "
            f"enabled={self.enabled}"
        )


def as_exit_rule(rule: "ExitRule | float", name: str = "rule", criterion: str = "max_prob") -> ExitRule:
    """Return ``rule``, or the rule with that threshold for a criterion; errors call the argument by ``name``."""
    if isinstance(rule, ExitRule):
        return rule
    if not isinstance(rule, (int, float)):
        raise TypeError(f"{name}: got {kind_of(rule)}, wants an ExitRule or a threshold (a float)")
    return ExitRule(rule, criterion=criterion)


def own_rule(rule: ExitRule | float, device: torch.device | str | None) -> ExitRule:
    """Return a copy on a device: heads that shared a rule would overwrite each other's threshold."""
    with torch.inference_mode(False):  # what is copied in inference mode could not be written outside of it
        made = copy.deepcopy(as_exit_rule(rule))
        return made if device is None else made.to_empty(device=device)  # which has its values, off the meta device too


def _checked(enabled: object) -> bool:
    """Return ``enabled`` as a bool; ``TypeError`` for what Python takes for one, as it takes "no" for True."""
    if not isinstance(enabled, (bool, np.bool_)):
        raise TypeError(f"enabled: got {enabled!r:.50}, wants True or False")
    return bool(enabled)
