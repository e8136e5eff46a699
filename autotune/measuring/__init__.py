"""The rig that all measuring commands share: networks to measure, timers, checks of answers, traces, progress.

In: a cell (a network, data type, batch, classes and placement of heads) or a user's network. Out: times in microseconds
of variants whose answers were checked first.
"""
