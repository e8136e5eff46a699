"""Calibration: what each exit answers on a validation split, and the thresholds that keep a given accuracy."""
