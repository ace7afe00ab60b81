"""Typed, nested, strict configuration: one YAML file is one run."""
