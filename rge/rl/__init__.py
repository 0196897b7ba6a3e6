"""Reinforcement learning of rationales: rewards, advantages, policy losses; the step itself is `rge.step`'s."""
