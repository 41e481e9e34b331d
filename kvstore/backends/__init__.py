"""Backends: one module each; they never import each other. See `kvstore.backend`."""
