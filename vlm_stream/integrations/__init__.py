"""Plugs for trainers: one module for each, which imports its trainer's package; this one imports nothing."""
