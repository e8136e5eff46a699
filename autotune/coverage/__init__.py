"""``auxhead-tune coverage``: how often the bound of a calibration holds on samples that it has not seen.

In: a checkpoint of ``auxhead demo``. Out: a JSON file with the drop and the exits of each of many splits.
"""
