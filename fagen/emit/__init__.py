"""From plans to CUDA a person can read: expressions to statements, records to text."""
