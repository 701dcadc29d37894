"""Laws of changed losses, labels and examples."""
