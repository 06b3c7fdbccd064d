"""What the slow tests share: sockets by hand, and watching what processes hold."""
