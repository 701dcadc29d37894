"""Laws of dropout."""
