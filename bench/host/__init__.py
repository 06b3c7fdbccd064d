"""The host's own time for a frame: what its loop thread does, and how long the GPU is idle; the
scheduler alone."""
