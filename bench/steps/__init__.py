"""How long a step takes: thinker steps and talker frames on a GPU, alone and together, and frames
on a CPU."""
