"""What it costs to move a payload to another process: a hop, and the copies of a link beside decode
steps."""
