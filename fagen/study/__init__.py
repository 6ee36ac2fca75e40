"""What is printed for people: plans explained, the ladder."""
