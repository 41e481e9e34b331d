"""The block-quantised codecs `ggml.<scheme>`: f16 and the 24 schemes of ggml, at a fixed rate."""
