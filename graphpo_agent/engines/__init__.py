"""What owns the weights: sampling with them and learning."""
