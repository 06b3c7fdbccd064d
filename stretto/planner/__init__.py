"""How many cards a load needs: arrivals are replayed through the real scheduler, with step times measured on a card.

Knows no model: a table tells what a pipeline's steps take. Imports no torch."""
