"""Hash of the kernels' code: configurations measured with other code are not used."""

import hashlib
import tokenize
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

#: The Triton functions: launch configurations steer these alone, though not all of these.
FOLDER = Path(__file__).parents[1] / "jit"
#: Modules that compute the constants of these functions, which read properties, too.
CONSTANTS = tuple(Path(__file__).with_name(name) for name in ("constants.py", "launch_config.py"))

#: By hash, those of earlier code of which launches under ``max_prob`` are the same machine code for compute capability
#: 9.0, as tests/kernels/test_machine_code.py finds: what was measured with it holds for this. The last of them that a
#: table names is there too, since a change of the code replaces the key.
SAME_MACHINE_CODE = {
    "2ded04cf685e53c3": (
        "f6385aa99f1ae7b1", "6ca5fbf9c770cadf", "1c7f0dd2ac8c693e",
        "e1b28afa545903d7", "4b132c53a2a74f94", "836c5eb7dcf7e9ab", "b41336059b5950a8", "ebb8260d3f761adb",
        "39cd7e348dca1eba", "946371c5f7c800ca", "c9b50b09b067b219", "955f1370fe7b006e", "bca2e3ad2ba391f3",
    )
}  # fmt: skip


@lru_cache
def kernel_hash() -> str:
    """Return the hash of the code in ``kernels/jit`` and of what computes its constants, 16 hexadecimal digits.

    Comments, docstrings, blank lines and imports do not count: a table is not to be thrown away for one of them. What
    is imported from elsewhere in the folder counts there; numbers of criteria and activations, in reference/, do not.
    """
    digest = hashlib.sha256()
    for path in (*sorted(FOLDER.glob("*.py")), *CONSTANTS):
        digest.update(_code(path.read_text(encoding="utf-8")).encode())
    return digest.hexdigest()[:16]


def is_measured_code(kernel: str) -> bool:
    """Return whether what was measured with the code of a hash holds for the code here."""
    return kernel in (kernel_hash(), *SAME_MACHINE_CODE.get(kernel_hash(), ()))


def _code(source: str) -> str:
    """Return a source without comments, docstrings, imports and blank lines, the same in every Python version."""
    lines = source.splitlines(keepends=True)
    starts = [0, *accumulate(map(len, lines))]
    kept, end = [], 0
    begins, imports = True, False  # a statement begins here, so that a string is a docstring; it is an import
    for token in tokenize.generate_tokens(iter(lines).__next__):
        imports = token.string in ("import", "from") if begins else imports
        if imports or token.type == tokenize.COMMENT or (begins and token.type == tokenize.STRING):
            kept.append(source[end : starts[token.start[0] - 1] + token.start[1]])
            end = starts[token.end[0] - 1] + token.end[1]
        if token.type not in (tokenize.NL, tokenize.COMMENT) and not (begins and token.type == tokenize.STRING):
            begins = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    code = "".join(kept) + source[end:]
    return "\n".join(line.rstrip() for line in code.splitlines() if line.strip())
