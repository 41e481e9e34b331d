"""Copying sessions between archives, byte for byte or coded anew. `run.migrate` is the way in."""
