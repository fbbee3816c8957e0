"""The bytes of tensors: where they are, in what dtype, and how they become arrays. No torch."""
