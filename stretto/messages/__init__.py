"""The messages between the engine and its hosts. Imports no torch."""
