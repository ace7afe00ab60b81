"""Arithmetic that models share; each fast version stands beside the torch that defines it."""
