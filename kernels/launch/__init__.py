"""Launches of kernels: checked arguments, the sizes that decide, the chosen ``LaunchConfig``, memory of programs.

In: the arguments of a head. Out: what its kernel is launched with: an override, else the entry of the device's table or
of one that it borrows, in ``tuned/``, else what a rule says.
"""
