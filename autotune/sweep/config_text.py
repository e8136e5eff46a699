"""Launch configurations as text, ``n1-c32-p1-...``: the names that records and tables give them."""

from ...kernels.launch.launch_config import LaunchConfig

#: The field that each part of a configuration's text stands for.
_LETTERS = {
    "n": "block_n",
    "c": "block_c",
    "p": "block_p",
    "a": "block_a",
    "f": "block_f",
    "k": "block_k",
    "s": "block_s",
    "j": "block_j",
    "parts": "window_parts",
    "stages": "stages",
    "buffers": "weight_buffers",
    "warps": "num_warps",
    "waits": "waits",
    "registers": "max_registers",
    "programs": "max_programs",
    "last": "last_rows",
}


def text(config: LaunchConfig) -> str:
    """Write a configuration: ``n1-c32-p1-a64-f1-k512-s8-j1024-parts2-stages1-warps4``, and what else it has.

    If features lie in memory before they are multiplied, it ends in ``packed``, ``in_place`` or ``library``.
    """
    values = [(letters, int(getattr(config, name))) for letters, name in _LETTERS.items()]
    words = [f"{letters}{value}" for letters, value in values if value]
    return "-".join([*words, _features(config)] if config.reads or config.by_library else words)


def changes(config: LaunchConfig, rule: LaunchConfig) -> str:
    """Write what of a configuration differs from the rule's: ``c32 warps8``."""
    values = [(letters, int(getattr(config, name)), int(getattr(rule, name))) for letters, name in _LETTERS.items()]
    words = [f"{letters}{value}" for letters, value, usual in values if value != usual]
    return " ".join([*words, *[_features(config)] * (config.features != rule.features)]) or "as by rule"


def _features(config: LaunchConfig) -> str:
    return config.features.replace(" ", "_")
