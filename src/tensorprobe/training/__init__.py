"""Recording and guarding of trainings that a framework runs: Hugging Face's Trainer, Lightning."""
