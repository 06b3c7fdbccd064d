"""What all benchmarks share: the record of the machine, workloads, servers and hosts to measure,
rounds, results."""
