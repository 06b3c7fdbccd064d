"""What orchestrator and stages have in common: the messages between them, and their settings.
Imports no torch."""
