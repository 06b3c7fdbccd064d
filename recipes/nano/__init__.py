"""The recipe of the small speaking checkpoint: corpus, codec, tokenizer, thinker, talker, export,
score.

`python -m recipes.nano STEP` runs one step; README.md beside this file says in which order and how
long each takes. Nothing in `stretto/` imports from here."""
