"""One client's attacks, and what the other clients of the same server notice of them."""
