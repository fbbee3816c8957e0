"""The inside of parts compiled by torch.compile: its graphs, what went through them, which stage
of compiling made a wrong result."""
