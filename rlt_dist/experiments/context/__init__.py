"""How far back models make use of text."""
