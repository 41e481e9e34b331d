"""Decoding on GPUs: the plans of `kvcodecs`, executed by CUDA kernels, with the same bits."""
