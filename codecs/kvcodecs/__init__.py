"""Codecs of KV-cache streams: tensors to bytes and back, never files."""
