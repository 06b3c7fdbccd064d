"""A family in a package of its own: a small dense decoder that answers text with text."""
