"""Checkpoints: written beside, checked, then committed by one rename."""
