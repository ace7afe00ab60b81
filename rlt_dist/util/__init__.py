"""Helpers that every floor may use: errors, atomic files, logging."""
