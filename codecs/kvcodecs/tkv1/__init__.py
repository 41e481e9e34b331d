"""The TKV1 codec."""
