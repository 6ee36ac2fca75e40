"""The graph of a program, what it means, and how it reads as mathematics."""
