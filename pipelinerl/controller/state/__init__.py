"""What the controller knows, and what reaches it and leaves it: values."""
