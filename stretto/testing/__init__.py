"""Tiny checkpoints of random weights, and what else tests of a family need. No server runs this;
`stretto tiny` writes one, and a server without any model serves one."""
