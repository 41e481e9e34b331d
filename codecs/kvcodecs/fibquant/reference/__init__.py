"""FibQuant once more, in plain Python and NumPy: what the fast code must equal. FORMAT.md 11."""
