"""Raw text to a corpus."""
