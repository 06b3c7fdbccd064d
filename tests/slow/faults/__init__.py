"""Hosts are killed, thousands of mixed requests run: is every caller answered, and what leaks?"""
