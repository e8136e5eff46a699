"""Calibration: temperatures and thresholds of the exits, chosen on held-out samples, and what they cost.

In: a network and labelled data, or what each exit answers for it. Out: a threshold for each head, and a report of
accuracy, a bound on its drop, and latency. ``calibrate_network`` fits temperatures, and proves a bound;
``measure_exit_latencies`` times a runner for it; ``anytime_curve`` tests accuracy at every level of work.
``retune_thresholds`` follows samples that come later, by what was logged of them; ``Retuner`` logs them while runners
answer, and ``replay`` simulates that.
"""
