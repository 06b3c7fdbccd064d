"""Is every caller answered when hosts are killed, are thousands of mixed answers exact, and does
nothing leak?"""
