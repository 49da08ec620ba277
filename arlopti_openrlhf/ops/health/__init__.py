"""What a run says of itself, and when that ends it."""
