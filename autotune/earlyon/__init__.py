"""``auxhead-tune earlyon``: early exits trained and calibrated by earlyon and by this package, side by side.

In: nothing but the digits; earlyon is installed. Out: a JSON file with accuracy and exits of each seed and way.
"""
