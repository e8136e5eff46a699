"""Captures of a cell's variants: built once, kept by name, closed together."""

from ..measuring.subject import Subject
from .variants import BuildContext, BuiltVariant, Variant


class VariantCaptures:
    """Builds variants of one cell and owns what was built."""

    def __init__(self, subject: Subject) -> None:
        self.context = BuildContext(subject)
        self.built: dict[str, list[BuiltVariant]] = {}
        """By variant; of one whose build failed those that came before."""
        self.failed: dict[str, str] = {}
        """Errors of variants that are not to be built again."""

    def build(self, variant: Variant, pattern: str) -> list[BuiltVariant]:
        """Return the captures of a variant for an exit pattern, built unless they are there.

        Raises:
            Exception: whatever a capture fails with.
        """
        if variant.name not in self.built:
            captures = self.built.setdefault(variant.name, [])
            for _ in range(variant.captures):
                captures.append(variant.build(self.context, pattern))
        return self.built[variant.name]

    def drop(self, name: str) -> None:
        """Close a variant's captures."""
        for capture in self.built.pop(name, []):
            capture.close()

    def close(self) -> None:
        """Close all captures."""
        for name in list(self.built):
            self.drop(name)
