"""Archives that zarr tools open: frames are chunks, in a directory or in a bucket."""
