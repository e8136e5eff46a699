"""``auxhead-tune promote`` and ``explain``: tuned tables from the records of sweeps, and why a head is launched so.

In: records of sweeps. Out: ``kernels/launch/tuned/DEVICE.json``.
"""
