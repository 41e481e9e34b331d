"""Other formats that sessions are migrated from and to: .tkv stream files, zarr format 2."""
