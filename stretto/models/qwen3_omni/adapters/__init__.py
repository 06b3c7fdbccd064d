"""What the runner needs of the thinker and the talker."""
