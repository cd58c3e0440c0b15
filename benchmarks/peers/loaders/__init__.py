"""The loaders of the comparison, one file each."""
