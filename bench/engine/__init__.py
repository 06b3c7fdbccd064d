"""The engine without HTTP, in its processes: load of any kind, answers by a grammar, and the
released size."""
