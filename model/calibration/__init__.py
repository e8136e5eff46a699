"""Calibration: thresholds of the exits, chosen on a validation split so that accuracy drops by at most a given amount.

In: what each exit answers for the split. Out: a threshold for each head, and the accuracy under them.
"""
