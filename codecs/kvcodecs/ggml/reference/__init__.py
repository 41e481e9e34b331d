"""The schemes once more, in readable NumPy: what FORMAT.md section 10 says, line by line.

Tests hold the core against this; nothing else runs it.
"""
