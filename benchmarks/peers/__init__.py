"""The same work for every loader that users choose between, in one run on one machine."""
