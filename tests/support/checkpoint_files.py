"""The files of a checkpoint: their names, and what points to parameters that a test has changed."""

import json
from pathlib import Path

from auxhead.model import EarlyExitNetwork, ExitRule, FusedAuxHead
from auxhead.model.saving.checkpoint_files import content_hash
from support.example_models import SmallNet, plain_heads


def weights_of(folder: Path) -> Path:
    """The file of a checkpoint's parameters."""
    (path,) = folder.glob("model-*.safetensors")
    return path


def point_to_parameters(folder: Path) -> None:
    """Let the description have the hash of the parameters as they are now, so that changed ones are read."""
    weights, description = weights_of(folder), folder / "model.json"
    found = content_hash(weights)
    weights.rename(folder / f"model-{found[:16]}.safetensors")
    description.write_text(json.dumps({**json.loads(description.read_text()), "parameters": found}))


def saved_network() -> EarlyExitNetwork:
    """Heads and rules of several kinds."""
    heads = {**plain_heads(), "block1": FusedAuxHead(24, 5, pool="max", pool_size=(2, 1), bias=False, dropout=0.25)}
    rules = {"block0": ExitRule(0.25, temperature=2.0), "block1": ExitRule(0.5, enabled=False), "block2": 0.1}
    return EarlyExitNetwork(SmallNet(), heads, rules)
