"""Names of trunks and runners, as options, variants and records have them; no torch."""

#: The trunk as the user wrote it.
AS_IS = "as_is"
#: Trunks that are measured unless ``--variant`` names others.
TRUNKS = (AS_IS, "cudnn")
#: Further trunks that ``--variant`` may name.
MORE_TRUNKS = ("inductor",)
#: Runners that are measured on every trunk, as ``make_runner`` names them.
RUNNERS = ("overlapped", "polled", "gated")
