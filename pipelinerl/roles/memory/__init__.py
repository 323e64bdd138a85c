"""What a run's processes will take of their devices' memory, from the recipe and the model's sizes alone."""
