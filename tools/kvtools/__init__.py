"""The `kvstore` command: pack, unpack, ls, info, verify, rm, demo and bench.

Everything here is built on the public interface of `kvstore`; nothing in `kvstore` or `kvcodecs`
imports this package.
"""
