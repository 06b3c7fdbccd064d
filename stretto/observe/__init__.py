"""What the parts of a server measure of themselves: counters, histograms and spans, under one
recorder per process."""
