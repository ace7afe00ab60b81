"""A prepared corpus on disk: its index, its documents, and whether it is whole."""
