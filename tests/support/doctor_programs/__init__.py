"""Small programs that the doctor is tested with: planted faults and correct ones, each a factory for its TARGET.

A factory takes nothing, and returns something callable and its input; a call is one request.
"""
