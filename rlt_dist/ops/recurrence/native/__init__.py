"""The loop compiled for the CPU: C++ without torch, built once a machine by torch's own builder."""
