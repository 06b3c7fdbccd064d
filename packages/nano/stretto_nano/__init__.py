"""Data only: `checkpoint/` beside this file is found by `stretto.embedded`."""
