"""Hooks on layers: what users put there, a forward of their own too, and ours."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn


def why_not_plain(module: nn.Module) -> str | None:
    """Return why a layer does not compute what its class says of its own parameters; None if it does.

    It is for the caller to ask for the class itself: parametrizations, say, give a layer another one.
    """
    own = vars(module)
    if "forward" in own:
        return "has a forward of its own"
    for name in ("weight", "bias"):
        if name in own and name not in own.get("_former_parameters", ()):  # of a replica of DataParallel
            return f"computes its {name} (by hooks of torch.nn.utils.weight_norm or prune, say)"
    return "carries hooks" if has_hooks(module) else None


#: A head's ways to answer: a call takes one of them, a launch, training and calibration others.
WAYS = ("forward", "answer", "launch_input", "logits", "features", "logits_of_features")


def overridden(head: nn.Module, base: type[nn.Module]) -> str | None:
    """Return what of a head's ways to answer is not that of its class of ours; None if all are."""
    for name in WAYS:
        if name in vars(head) or getattr(type(head), name) is not getattr(base, name):
            return f"has a {name} of its own"
    return None


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module carries hooks of its own, which whatever stands in for it would not call."""
    return any(map(users_hooks, hooks_of(module)))


def put_on_state(module: nn.Module) -> str | None:
    """Return what a layer keeps beside what its class computes with, and whatever takes its place would not keep."""
    known = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    for name in (*module._parameters, *module._buffers):
        if name not in known:
            return f"keeps {name!r}"
    kinds = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    return "carries hooks of its state_dict" if any(getattr(module, kind) for kind in kinds) else None


def users_hooks(hooks: Mapping[int, Any]) -> list[Any]:
    """Return those of a module's hooks of one kind that are not ours."""
    return [hook for hook in hooks.values() if not isinstance(hook, ThreadHook)]


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """Return where PyTorch keeps the hooks of a module's calls, a dict for each kind."""
    return [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks]


class ThreadHook:
    """A forward hook that only the thread that made it calls, and no copy of the layer."""

    def __init__(self, hook: Callable[..., None]) -> None:
        """Take a hook for the current thread."""
        self._hook = hook
        self._thread = threading.get_ident()

    def __call__(self, *args: Any) -> None:
        """Go on in that thread."""
        if threading.get_ident() == self._thread:
            self._hook(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies of a layer that others make meanwhile, deep or pickled, call nothing."""
        return ThreadHook, (_nothing,)


def _nothing(*_args: Any) -> None:
    pass


def is_earlyon(model: nn.Module) -> bool:
    """Return whether a model is a wrapper of earlyon: a backbone, heads that hooks call, a config that says where."""
    heads, config = getattr(model, "exit_heads", None), getattr(model, "config", None)
    settings = ("exit_points", "routing_policy", "temperatures", "enabled_exits")
    bound = ("_hook_handles", "_feature_adapters", "_final_classifier")
    return (
        isinstance(heads, nn.ModuleDict)
        and isinstance(getattr(model, "backbone", None), nn.Module)
        and all(hasattr(config, name) for name in settings)
        and all(hasattr(model, name) for name in bound)
    )
