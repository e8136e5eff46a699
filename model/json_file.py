"""``write_json``: writes JSON files that are complete or absent."""

import json
import os
import threading
from pathlib import Path


def write_json(path: Path, content: object) -> None:
    """Write a JSON file, or leave the one that is there as it is; of several writers at a time the last one wins."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
