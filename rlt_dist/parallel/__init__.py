"""Models cut over a mesh, from outside: where each layer sits and in what order stages work."""
