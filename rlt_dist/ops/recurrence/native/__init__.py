"""The loop compiled for the CPU: C++ without torch, kept in the user's cache once compiled."""
