"""Checkpoints: taps, heads, exit rules and input format in ``model.json``, parameters in the file that it points to."""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..basics.arguments import is_plain, is_wrapped, kind_of, tensor_in_words
from ..basics.bad_input import BadInput, one_line
from ..basics.preprocessing import Preprocessing
from ..basics.tables import wrapped
from ..listening.hooks import is_earlyon
from ..listening.kept import modes_kept
from ..network.early_exit_network import EarlyExitNetwork, check_network
from ..network.learned_from import OF_RULE, LearnedFrom, fingerprint
from ..own_exits.attach_exits import attach_exits
from .checkpoint_files import DESCRIPTION, read_files, weights_name, write_files
from .description import (
    FORMAT,
    checked_modules,
    describe_head,
    make_heads,
    saved_extract,
    saved_rule,
    wrong_field,
)

#: Fields of a head that may be changed without making it another one.
_FREE = {"return_probs", "dropout"}


@dataclass(frozen=True)
class Checkpoint:
    """A loaded network, and the facts by which its answers get names."""

    network: EarlyExitNetwork
    """In eval mode, its rules set, on the device of the backbone; heads of one on meta are on the CPU."""
    classes: tuple[str, ...]
    """Names, in the order of the labels; empty if none were saved."""
    accuracy: Mapping[str, float]
    """Facts for people, 0 to 1."""
    calibration: Mapping[str, Any] | None
    """How the rules were found, as :meth:`CalibrationReport.to_json` says it; None if it was not saved."""

    def __repr__(self) -> str:
        """Say what the network is, its classes, and the facts."""
        classes = f"{len(self.classes)} classes: {', '.join(self.classes)}" if self.classes else "Classes have no names"
        facts = [f"{name}: {share:.1%}" for name, share in self.accuracy.items()]
        calibrated = "Not calibrated." if self.calibration is None else "Calibrated."
        return wrapped([*self.network.describe().splitlines(), classes, *facts, calibrated])

    def read_images(self, paths: Sequence[str | os.PathLike[str]]) -> Tensor:
        """Read image files as the network's input, [N, C, crop, crop], in its dtype and on its device.

        Raises:
            BadInput: a file that cannot be read as an image, or a network without ``preprocessing``.
        """
        prepare = self.preprocessing
        pixels = torch.stack([prepare.read_pixels(path) for path in paths])
        return prepare.normalised(pixels.to(self.network.device)).to(self.network.dtype)

    @property
    def preprocessing(self) -> Preprocessing:
        """The network's; ``BadInput`` if it has none."""
        if self.network.preprocessing is None:
            raise BadInput(
                "checkpoint: was saved without preprocessing, wants to be told how image files become input: "
                "network.preprocessing = Preprocessing(crop=224, resize=256) before save_checkpoint; or, of other "
                "inputs, export_exits(network, batch, path) in Python"
            )
        return self.network.preprocessing


def save_checkpoint(
    directory: str | os.PathLike[str],
    network: EarlyExitNetwork,
    *,
    backbone: str | None = None,
    with_backbone: bool = True,
    classes: Sequence[str] = (),
    accuracy: Mapping[str, float] | None = None,
    calibration: Mapping[str, Any] | None = None,
) -> None:
    """Write a network: parameters as safetensors; preprocessing, taps, heads and rules as JSON that people can read.

    ``model.json`` names the file of the parameters by its content and takes the place of an older one last: whatever
    ends a save, and whoever reads or writes beside it, the folder holds the old checkpoint or the new one.

    Args:
        directory: made if it is not there.
        network: what to write; heads made with ``in_features=None`` have seen a batch.
        backbone: what makes the backbone, as ``package.module:function``; told to whoever loads, and never called.
        with_backbone: False keeps the heads alone, for a backbone whose parameters are kept elsewhere.
        classes: names, in the order of the labels; as many as the network has classes, or none.
        accuracy: facts for people, 0 to 1.
        calibration: the report of :func:`calibrate_network`, by its ``to_json()``; of the rules and parameters that the
            network has, for which its promise holds.

    Raises:
        ValueError, TypeError: a network that could not be loaded again: a head of another class or with a parametrized
            linear layer, one that does not know its width, a state of the backbone that is no tensor, is sharded or on
            the device meta; nothing is written.
        OSError: no space or no permission; names the path, and what was there is as it was.

    Example:
        >>> backbone = torchvision.models.shufflenet_v2_x0_5(num_classes=3)
        >>> network = EarlyExitNetwork(backbone, {"maxpool": FusedAuxHead(24, 3)}).eval()
        >>> save_checkpoint(folder, network, backbone="torchvision.models:shufflenet_v2_x0_5", classes=["a", "b", "c"])
    """
    check_network(network)
    heads = {tap: describe_head(network, tap, head) for tap, head in zip(network.taps, network.exit_heads, strict=True)}
    description = {
        "format": FORMAT,
        "backbone": backbone,
        "with_backbone": with_backbone,
        "classes": list(classes) if isinstance(classes, tuple) else classes,
        "heads": heads,
        "preprocessing": None if network.preprocessing is None else network.preprocessing.as_json(),
        "accuracy": {} if accuracy is None else accuracy,
        "calibration": calibration,
        "logits": network.logits_part,
        "parameters": "0" * 64,  # until they are written
        "own_exits": network.own_exits,
        "learned_from": None if network.learned_from is None else network.learned_from.facts(),
    }
    wrong = wrong_field(description)
    if wrong is not None:
        raise TypeError(wrong)
    state = _kept_state(network, with_backbone)
    _check_saveable(state)
    if calibration is not None:
        _check_calibration(network, calibration)
    num_classes = network.exit_heads[0].num_classes
    if classes and len(classes) != num_classes:
        raise ValueError(f"classes: got {len(classes)} names, wants {num_classes}, as the network has classes, or none")
    tensors = {} if network.learned_from is None else network.learned_from.tensors()
    for name, value in state.items():
        tensors[name] = value.detach().cpu().contiguous().clone()  # a copy: safetensors refuses what shares memory
    where = _folder(directory)
    if where.exists() and not where.is_dir():
        raise ValueError(f"directory: got {where}, a file, wants a directory")
    where.mkdir(parents=True, exist_ok=True)
    write_files(where, description, tensors)


def load_checkpoint(
    directory: str | os.PathLike[str],
    backbone: nn.Module,
    *,
    extract: Mapping[str, Callable[[Any], Tensor]] | None = None,
    modules: Mapping[str, nn.Module] | None = None,
) -> Checkpoint:
    """Read what :func:`save_checkpoint` wrote: make the heads, attach them, and load every parameter that was saved.

    Nothing named in the files is imported or called: the backbone comes from the caller, as ``model.json`` names it.

    Args:
        directory: of the checkpoint.
        backbone: made like the one that was saved. Parameters that the checkpoint holds are copied into it, in the
            dtype in which they were saved; it keeps its device and is set to eval mode. If the checkpoint holds the
            heads alone it keeps its parameters. Of a network that :func:`attach_exits` made, the model as it was
            handed to that: its exits are found again, by a batch of noise of the size that was saved. What is on the
            device meta (made under ``with torch.device("meta")``) stays there, in the dtype that was saved, and is not
            read: ``network.unread`` is the file that has it.
        extract: the functions by which heads read what their taps return, where the network had some, by tap: they
            cannot be saved. An :class:`Extract` was.
        modules: made like those of the network's :class:`ModuleHead` heads, where it had some, by tap. They take over
            the parameters that were saved, as the backbone does.

    Raises:
        BadInput: files that are missing, damaged or of another format, a backbone that they do not fit, which is left
            as it was, or a function or a module that is missing; or something on meta that no file has.

    Example:
        >>> def make():
        ...     return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
        >>> save_checkpoint(folder, EarlyExitNetwork(make(), {"1": FusedAuxHead(8, 5)}, rules=0.9))
        >>> loaded = load_checkpoint(folder, make())
        >>> loaded.network.taps, round(loaded.network.exit_heads[0].rule.threshold, 3)
        (('1',), 0.9)
    """
    where = _folder(directory)
    unread = _left_in_file(backbone)
    description, tensors = read_files(where, frozenset(unread))
    made_by = f"; it was made by {one_line(description['backbone'])}" if description["backbone"] else ""
    if not isinstance(backbone, nn.Module) or isinstance(backbone, EarlyExitNetwork):
        raise BadInput(f"backbone: got {kind_of(backbone)}, wants an nn.Module, without heads of ours{made_by}")
    if unread and not description["with_backbone"]:
        name = unread[0].removeprefix("backbone.")
        nowhere = f"{where} has the heads alone, so that its values are nowhere to be read"
        raise BadInput(f"backbone: its {name!r} is on meta, and {nowhere}; wants a backbone with its values")
    learned_from = LearnedFrom.of_facts(where, description["learned_from"], tensors)
    layers = dict(backbone.named_modules(remove_duplicate=False))
    missing = [tap for tap in description["heads"] if tap not in layers]
    if description["own_exits"] is not None and (missing or is_earlyon(backbone)):
        network, modules = _found_again(where, description, backbone), {}
    else:
        if missing:
            has_no = f"{type(backbone).__name__} has no layer {missing[0]!r:.60}"
            raise BadInput(f"backbone: {has_no}, behind which {where} has a head{made_by}")
        own_code = [tap for tap, head in description["heads"].items() if "module" in head]
        if description["own_exits"] is not None and own_code and not modules:
            what = f"the exit at {own_code[0]!r:.60} in {where} runs as the model's own code"
            raise BadInput(f"backbone: {what}; wants the model that was handed to attach_exits, not its backbone")
        modules = checked_modules(where, description["heads"], modules)
        for tap, module in modules.items():
            for name in _on_meta(module):
                wants = "wants it on the CPU, since heads are read whole"
                raise BadInput(f"modules[{tap!r:.60}]: its {name!r} is on meta, {wants}")
        with torch.device("cpu"):  # whatever device the caller makes tensors on
            heads = make_heads(where / DESCRIPTION, description["heads"], tensors, modules)
        network = EarlyExitNetwork(
            backbone,
            heads,
            extract=saved_extract(where, description["heads"], {} if extract is None else extract),
            logits=description["logits"],
        )
        network.heads.to(_device_of(backbone))
    saved = _kept_state(network, description["with_backbone"])
    for number, tap in enumerate(network.taps):
        if tap in modules:
            misfit = _misfit(*(_below(f"heads.{number}.module.", state) for state in (saved, tensors)))
            if misfit is not None:
                raise BadInput(f"modules[{tap!r:.60}]: {type(modules[tap]).__name__} does not fit {where}: {misfit}")
    misfit = _misfit(saved, tensors)
    if misfit is not None:
        raise BadInput(f"backbone: {type(backbone).__name__} does not fit {where}: {misfit}{made_by}")
    for name, value in saved.items():
        if value.dtype != tensors[name].dtype:
            value.data = value.data.to(tensors[name].dtype)
    state = network.state_dict()  # with the versions of modules, which some of torchvision's want
    state.update(tensors)
    network.load_state_dict(state)
    network.own_exits = description["own_exits"]
    backbone.eval()
    network.learned_from = learned_from
    network.unread = (where / weights_name(description)).resolve() if unread else None
    if description["preprocessing"] is not None:
        network.preprocessing = Preprocessing.of_json(description["preprocessing"])
    return Checkpoint(
        network.eval(),
        tuple(description["classes"]),
        description["accuracy"],
        description["calibration"],
    )


def _check_saveable(state: Mapping[str, Any]) -> None:
    """Raise ``TypeError`` or ``ValueError`` for a state that files do not keep, or that has no values."""
    for name, value in state.items():
        if not isinstance(value, Tensor) or is_lazy(value) or not is_plain(value):
            lazy = not isinstance(value, Tensor) or is_lazy(value)
            got = f"a {type(value).__name__}" if lazy else tensor_in_words(value)
            gathered = "; what is sharded, gathered by torch.distributed.checkpoint.state_dict.get_model_state_dict"
            wants = f"dense tensors alone{gathered if is_wrapped(value) else ''}"
            raise TypeError(f"network: its state {name!r} is {got}, wants {wants}")
        if value.is_meta:
            wants = "wants values: those of load_checkpoint(directory, backbone) with a backbone that is not on meta"
            raise BadInput(f"network: its state {name!r} is on meta, without values; {wants}")
        if not name.startswith(("backbone.", "heads.")):
            raise ValueError(f"network: keeps {name!r}, which files do not; wants that in the backbone")


def _check_calibration(network: EarlyExitNetwork, report: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` where a report is of other rules or parameters: what it promises is of those."""
    wants = "wants the report of a calibration that came last, or None"
    if not {"rules", "parameters"} <= report.keys():
        raise ValueError(f"calibration: does not say of which rules and parameters it is; {wants}")
    rules = np.array([head.rule.numbers for head in network.exit_heads], np.float32)
    of_others = not np.array_equal(np.asarray(report["rules"], np.float32), rules)
    if of_others or not {*report["parameters"]} & {*fingerprint(network)}:
        which = "rules" if of_others else "parameters"
        raise ValueError(f"calibration: is of other {which} than the network has now; {wants}")


def _folder(directory: str | os.PathLike[str]) -> Path:
    """Return a path; an empty one would be the current folder, and safetensors reads none that is not UTF-8."""
    name = os.fspath(directory) if isinstance(directory, (str, os.PathLike)) else None
    if not isinstance(name, str):
        raise TypeError(f"directory: got {kind_of(directory)}, wants the path of a folder, as text")
    if not name:
        raise BadInput("directory: got an empty name, wants that of a folder; '.' is the current one")
    if re.search(r"[\0\ud800-\udfff]", name):
        raise BadInput(f"directory: got {name!r:.100}, wants the path of a folder in UTF-8")
    return Path(directory)


def _found_again(where: Path, description: Mapping[str, Any], model: nn.Module) -> EarlyExitNetwork:
    """Find the exits of a model, which are those that were saved, and give them their rules."""
    kind, example, described = type(model).__name__, description["own_exits"], description["heads"]
    for name in _on_meta(model):
        found = f"and the exits of {kind} are found by running it"
        wants = "wants it with values, or attach_exits(model, example).backbone.to('meta')"
        raise BadInput(f"backbone: its {name!r} is on meta, {found}; {wants}")
    rules = {tap: saved_rule(where / DESCRIPTION, tap, head) for tap, head in described.items()}
    dtype = getattr(torch, example["dtype"])
    if dtype.is_floating_point:  # the model may have been turned into another type afterwards
        dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), dtype)
        made = torch.randn(2, *example["input"], generator=torch.Generator().manual_seed(0)).to(dtype)
    else:
        made = torch.arange(2 * math.prod(example["input"])).reshape(2, *example["input"]).remainder(2).to(dtype)
    final = tuple(example["final"]) if isinstance(example["final"], list) else example["final"]
    try:
        with modes_kept(model):
            model.eval()  # which some models overwrite with a method that returns nothing
            network = attach_exits(model, made.to(_device_of(model)), final=final)
        heads = {
            tap: describe_head(network, tap, head) for tap, head in zip(network.taps, network.exit_heads, strict=True)
        }
        for tap in sorted(described.keys() | heads.keys()):
            its, saved = heads.get(tap, {}), described.get(tap, {})
            if not (its and saved):
                has, was = ("an", "none") if its else ("no", "one")
                raise ValueError(f"it has {has} exit at {tap!r:.60}, where {was} was saved")
            for name in sorted((its.keys() | saved.keys()) - _FREE - {"rule"}):
                if its.get(name) != saved.get(name):
                    got, wanted = (f"{one.get(name)!r:.60}" for one in (its, saved))
                    raise ValueError(f"its exit at {tap!r:.60} has {name} {got}, saved was {wanted}")
    except Exception as error:  # of many kinds: the model is run
        raise BadInput(
            f"backbone: the exits of {kind} cannot be found as they were in {where}: {one_line(error)}; wants the "
            "model that was handed to attach_exits, or attach_exits(model, example).backbone"
        ) from None
    network.set_rules(rules)
    for tap, head in zip(network.taps, network.exit_heads, strict=True):
        for name in _FREE & described[tap].keys():
            setattr(head, name, described[tap][name])
    return network


def _kept_state(network: EarlyExitNetwork, with_backbone: bool) -> dict[str, Any]:
    """Return the parts of a network's state_dict that go into the file of parameters: rules do not."""
    return {
        name: value
        for name, value in network.state_dict(keep_vars=True).items()
        if (with_backbone or name.startswith("heads.")) and not OF_RULE.match(name)
    }


def _below(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a state whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _misfit(own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> str | None:
    """Return in words the first difference between the tensors that a network has and those that were saved."""
    if surplus := sorted(saved.keys() - own.keys()):
        return f"it has no {surplus[0]!r:.100}, which was saved ({len(surplus)} such)"
    if missing := sorted(own.keys() - saved.keys()):
        return f"its {missing[0]!r} was not saved ({len(missing)} such)"
    for name, value in own.items():
        if not is_lazy(value) and value.shape != saved[name].shape:
            return f"its {name!r} is {list(value.shape)}, saved was {list(saved[name].shape)}"
        if not _same_kind(value.dtype, saved[name].dtype):
            return f"its {name!r} is {value.dtype}, saved was {saved[name].dtype}"
    return None


def _same_kind(own: torch.dtype, saved: torch.dtype) -> bool:
    """Return whether one tensor may take over the dtype of another: the same one, or floats of 16 bits or more both."""
    both_float = own.is_floating_point and saved.is_floating_point
    return own == saved or both_float and min(own.itemsize, saved.itemsize) >= 2


def _on_meta(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module that are on the device meta, by name."""
    named = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return {name: tensor for name, tensor in named if tensor.is_meta}


def _left_in_file(backbone: object) -> list[str]:
    """Return the names in a file of the tensors that a backbone has on the device meta; none of what is no module.

    Raises:
        BadInput: one is not in the state_dict, so that no file has it.
    """
    on_meta = _on_meta(backbone) if isinstance(backbone, nn.Module) else {}
    state = backbone.state_dict(keep_vars=True) if isinstance(backbone, nn.Module) and on_meta else {}
    kept = {id(value) for value in state.values()}
    for name, value in on_meta.items():
        if id(value) not in kept:
            holder, _, key = name.rpartition(".")
            raise BadInput(
                f"backbone: its {name!r} is on meta, and not in its state_dict, so that no file has its values; wants "
                f"them on the CPU: backbone.get_submodule({holder!r}).{key} = a tensor that is computed there"
            )
    return [f"backbone.{name}" for name, value in state.items() if isinstance(value, Tensor) and value.is_meta]


def _device_of(backbone: nn.Module) -> torch.device:
    """Return the device of a backbone's first parameter that is not on meta; the CPU if there is none."""
    devices = (parameter.device for parameter in backbone.parameters() if not parameter.is_meta)
    return next(devices, torch.device("cpu"))
