"""``rename_layers``: gives the parameters of a classifier, in a state_dict, the names that a head has for them."""

from collections.abc import Sequence

from torch import Tensor

#: Of an exit rule, which classifiers have not.
_OF_RULE = "rule._extra_state"


def rename_layers(state_dict: dict[str, Tensor], prefix: str, own: Sequence[str], sources: Sequence[str]) -> None:
    """Rename in place, unless the names are the head's own already, or nothing tells which layer is which.

    Args:
        state_dict: of a whole model.
        prefix: of the head's names in it.
        own: the head's names of its layers with parameters, in the order in which they run.
        sources: names of the same layers in the classifier that the head was made of; ``own`` if there was none.
    """
    its = [key[len(prefix) :] for key in state_dict if key.startswith(prefix)]
    if all(any(key == f"{name}.weight" or key.startswith(f"{name}.parametrizations.") for key in its) for name in own):
        return
    found: Sequence[str] = list(dict.fromkeys(key.rpartition(".")[0] for key in its if key != _OF_RULE))
    if all(any(key.startswith(f"{source}.") for key in its) for source in sources):
        found = sources  # there may be more than weight and bias, those of a parametrization
    if len(found) != len(own):
        return
    renamed: dict[str, Tensor] = {}
    for source, name in zip(found, own, strict=True):
        old = f"{prefix}{source}."
        for key in [key for key in state_dict if key.startswith(old)]:
            renamed[f"{prefix}{name}.{key[len(old) :]}"] = state_dict.pop(key)
    state_dict.update(renamed)
