"""Figures from records: the command ``auxhead-plot``; no torch, no GPU.

In: records of ``auxhead-tune`` and reports of ``auxhead demo``. Out: figures as PNG and SVG, their numbers as JSON.
"""
