"""A whole training, watched: statistics of every step, rules that raise alarms, files, trends."""
