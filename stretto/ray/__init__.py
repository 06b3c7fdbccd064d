"""Serving on a Ray cluster: a Serve replica is one whole pipeline, its hosts are actors in its
placement group.

Ray places and starts; our own channel watches hosts, and audio never passes through Ray. Needs the
extra `stretto[ray]`; nothing outside of this folder imports Ray."""
