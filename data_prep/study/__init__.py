"""The study set: questions that text alone cannot answer, with oracle texts that leak what only the target shows."""
