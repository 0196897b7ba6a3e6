"""The study set: questions that a text alone cannot answer, with oracle texts that give away what only the target shows."""
