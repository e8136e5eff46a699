"""Figures from records: the command ``auxhead-plot``; no torch, no GPU.

In: records of ``auxhead-tune`` and reports of ``auxhead demo``. Out: PNG, SVG and the numbers drawn as JSON.
"""
